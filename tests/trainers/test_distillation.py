"""Distillation: what becomes of a teacher's word, how teachers are weighed, both losses by hand and against TRL's functions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from trainers.algorithms import LossInputs, SamplerNeeds
from trainers.algorithms.distillation import Distillation
from trainers.config import DistillationConfig
from trainers.errors import ConfigError
from trainers.head import token_logprobs
from trainers.packing import pack_row, pack_step
from trainers.rollouts.buffer import buffer_arrays
from trainers.rollouts.reconcile import reconcile
from trainers.rollouts.snapshot import Snapshot, read_samples, write_snapshot
from trainers.types import Prompt, Rollout, RolloutGroup, Sample, StepPlan, TeacherScores, TurnRecord, VersionSpan

TWO = {"math": "http://localhost:8001", "code": "http://localhost:8002"}


def config(**fields: Any) -> DistillationConfig:
    return DistillationConfig(model="m", dataset={"path": "d.jsonl"}, **fields)  # type: ignore[arg-type]


def scored(scores: TeacherScores) -> RolloutGroup:
    """One rollout: prompt 5, 9, completion 7, 2, 4 by versions 1, 2, 2; each sampled among three candidates but the second."""
    prompt = Prompt(0, 4, [], {}, np.array([5, 9], np.int32))
    turn = TurnRecord(
        prompt.token_ids,
        np.array([7, 2, 4], np.int32),
        np.array([-0.5, -0.25, -1.0], np.float32),
        [VersionSpan(0, 1, 1), VersionSpan(1, 3, 2)],
        "stop",
        top_ids=np.array([[7], [3], [4]], np.int32),
        top_logprobs=np.array([[-0.5], [-0.125], [-1.0]], np.float32),
        candidate_ids=np.array([7, 1, 0, 4, 8], np.int32),
        candidate_counts=np.array([3, 0, 2], np.int32),
    )
    rollout = Rollout(prompt, [turn], reconciled=reconcile([turn], 1024), teacher_scores=[scores])
    return RolloutGroup(prompt, [rollout])


def said(known: list[bool], target: list[float], ids: list[list[int]], logprobs: list[list[float]]) -> TeacherScores:
    return TeacherScores(
        "math",
        np.array(ids, np.int32).reshape(3, -1),
        np.array(logprobs, np.float32).reshape(3, -1),
        np.array(target, np.float32),
        np.array(known),
    )


def test_a_position_that_the_teacher_did_not_score_is_context():
    """The first is unknown; of the second only another token is known; the third's own token alone."""
    scores = said([False, True, True], [0, -math.inf, -0.5], [[3, 1], [8, -1], [-1, -1]], [[-1, -2], [-0.5, -9], [-9, -9]])
    scores.logprobs[scores.ids < 0] = -np.inf
    (sample,) = Distillation(config()).samples(scored(scores))
    assert sample.loss_mask.tolist() == [False, False, False, True, True] and sample.trained_tokens == 2
    assert sample.sampler_logprobs.tolist() == [0, 0, 0, -0.25, -1] and sample.versions.tolist() == [-1, -1, -1, 2, 2]
    assert (sample.version_min, sample.teacher, sample.advantage) == (2, "math", 1.0)
    assert sample.teacher_logprobs is not None and sample.teacher_logprobs.tolist() == [-math.inf, -0.5]
    assert sample.top_ids is not None and sample.top_ids.tolist() == [[8, -1], [-1, -1]]
    assert sample.top_logprobs is not None and sample.top_logprobs.tolist() == [[-0.5, -math.inf], [-math.inf, -math.inf]]
    assert sample.candidate_ids is not None and sample.candidate_ids.tolist() == [4, 8]
    assert sample.candidate_counts is not None and sample.candidate_counts.tolist() == [0, 2]


def test_a_policy_gradient_keeps_the_samplers_tops_and_needs_the_realised_token():
    scores = said([True, True, True], [-0.1, -math.inf, -0.5], [[]] * 3, [[]] * 3)
    algorithm = Distillation(config(loss="policy_gradient", score_centering=True, num_sampler_logprobs=1, top_k=3))
    assert algorithm.sampler_needs() == SamplerNeeds(1, True)
    (sample,) = algorithm.samples(scored(scores))
    assert sample.loss_mask.tolist() == [False, False, True, False, True] and sample.version_min == 1
    assert sample.top_ids is not None and sample.top_ids.tolist() == [[7], [4]]
    assert sample.teacher_logprobs is not None
    np.testing.assert_array_equal(sample.teacher_logprobs, np.array([-0.1, -0.5], np.float32))
    assert sample.candidate_ids is not None and sample.candidate_ids.tolist() == [7, 1, 0, 4, 8]


def test_a_sample_is_for_one_loss_and_one_temperature_of_the_teachers():
    """Tops are the teacher's or the sampler's, and a teacher's logprobs hold for the temperature it was asked at."""
    variants: list[dict[str, Any]] = [{}, {"loss": "policy_gradient"}, {"teacher_temperature": 2.0}]
    assert len({Distillation(config(**fields)).objective for fields in variants}) == 3
    assert Distillation(config(beta=0.5, temperature=0.7)).objective == Distillation(config()).objective


@pytest.mark.parametrize("loss", ["jsd", "policy_gradient"])
def test_samples_that_wait_in_a_checkpoint_are_read_for_their_own_loss_alone(tmp_path: Path, caplog: Any, loss: str):
    saved, resumed = Distillation(config()), Distillation(config(loss=loss))
    waiting = saved.samples(scored(said([True] * 3, [-0.1, -0.2, -0.5], [[3], [8], [5]], [[-1], [-2], [-3]])))
    state = {"objective": saved.objective}
    write_snapshot(tmp_path, Snapshot(state, buffer_arrays(waiting), []))
    read = read_samples(tmp_path, state, resumed.objective)
    if loss == "jsd":
        assert [sample.top_ids.tolist() for sample in read if sample.top_ids is not None] == [[[3], [8], [5]]]
    else:
        assert read == [] and "samples kept for distillation loss=jsd" in caplog.text


def test_a_sample_without_a_scored_position_trains_nothing():
    (sample,) = Distillation(config()).samples(scored(said([False] * 3, [0, 0, 0], [[]] * 3, [[]] * 3)))
    assert not sample.loss_mask.any()


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, (0, 8, 1.5, False)),
        ({"beta": 1.0}, (0, 0, 1.5, False)),
        ({"beta": 0.5, "teacher_top_k": 4}, (0, 1, 1.5, False)),
        ({"beta": 0.5, "teacher_top_k": 4, "exact_reverse_kl": True}, (4, 0, 1.5, False)),
        ({"loss": "policy_gradient"}, (0, 0, 0.7, True)),
    ],
)
def test_what_each_objective_asks_for(fields: dict[str, Any], needs: tuple[int, int, float, bool]):
    """Of the sampler, of the teacher; at which temperature the head works; whether candidate sets matter."""
    made = config(temperature=0.7, teacher_temperature=1.5, top_k=20, **fields)
    asked = Distillation(made).sampler_needs()
    assert (asked.top_logprobs, made.teacher_tops, made.loss_temperature, asked.candidates) == needs
    assert made.server_logprobs == asked.top_logprobs + 1
    assert DistillationConfig.model_validate(made.model_dump()) == made


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"teacher_server_urls": {}}, "no teacher is given"),
        ({"teacher_server_urls": {"a b": "http://x"}}, "'a b' cannot name a teacher"),
        ({"teacher_server_urls": {"..": "http://x"}}, "'..' cannot name a teacher"),
        ({"teacher_server_urls": {"a": "localhost"}}, "no address of a server"),
        ({"teacher_server_urls": {"a": "http://x", "b": "http://x/v1"}}, "http://x is named twice"),
        ({"exact_reverse_kl": True}, "set beta above 0"),
        ({"beta": 1.0, "add_tail_bucket": False}, "nothing is learned; leave add_tail_bucket out"),
        ({"beta": 1.5}, "less than or equal to 1"),
        ({"teacher_temperature": 0.005}, r"teacher_temperature\n.*greater than or equal to 0\.01"),
        ({"temperature": 0.005}, r"temperature\n.*greater than or equal to 0\.01"),
        ({"epsilon": 0.3}, "set loss=policy_gradient"),
        ({"loss": "policy_gradient", "beta": 0.5}, "set loss=jsd"),
        ({"loss": "policy_gradient", "score_centering": True, "importance_sampling": "sequence_mask"}, "score_centering=false"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        config(**fields)


def sample(teacher: str | None, trained: int, group: str = "0:0") -> Sample:
    mask = np.arange(trained + 1) > 0
    zeros = np.zeros(trained + 1, np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    made = Sample(group, np.arange(trained + 1, dtype=np.int32), mask, zeros, 1.0, 0, versions)
    if teacher is not None:
        made.teacher, made.teacher_logprobs = teacher, np.full(trained, -0.5, np.float32)
    return made


@pytest.mark.parametrize(
    ("samples", "weights"),
    [
        # N = 8 of 2 teachers: math has 2 tokens, 8 / (2·2) = 2; code 6, 8 / (2·6) = 2/3; every teacher's weights add up to 4
        ([("math", 2), ("code", 5), ("code", 1)], [2, 2 / 3, 2 / 3]),
        # one teacher present: as without balance
        ([("code", 3), ("code", 4)], [1, 1]),
        # N = 12 of 3: 12 / (3·1) = 4, 12 / (3·8) = 1/2, 12 / (3·3) = 4/3
        ([("math", 1), ("code", 8), ("law", 3)], [4, 0.5, 4 / 3]),
    ],
)
def test_balance_equals_a_hand_computed_table(samples: list[tuple[str, int]], weights: list[float]):
    made = [sample(*each) for each in samples]
    Distillation(config(teacher_balance=True)).step(made)
    assert [each.advantage for each in made] == pytest.approx(weights, abs=1e-12)
    Distillation(config()).step(made)
    assert [each.advantage for each in made] == [1.0] * len(made), "a buffer's weights are those of another step"


def test_rows_number_teachers_as_the_config_does_and_an_unknown_one_is_refused():
    samples = [sample("code", 1), sample("math", 2)]
    row = pack_row(samples, teachers=config(teacher_server_urls=TWO).teachers)
    assert row.teacher_index.tolist() == [1, 0, 0] and row.teacher_logprobs.tolist() == [-0.5] * 3
    assert len(pack_row([sample(None, 2)]).teacher_index) == 0
    with pytest.raises(ConfigError, match=r"scored by a teacher 'code'.*names math"):
        pack_row(samples, teachers=("math",))


def inputs(
    logprobs: list[float], teacher: list[float], tops: Any, other_tops: Any, index: list[int], **more: Any
) -> LossInputs:
    def real(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    ones = torch.ones(len(logprobs), dtype=torch.float64)
    made = LossInputs(
        logprobs=real(logprobs).requires_grad_(),
        entropy=ones * 0.25,
        argmax_hit=ones.bool(),
        sampler_logprobs=real(logprobs),
        advantages=ones,
        sequence_index=ones.long(),
        top_logprobs=real(tops),
        other_top_logprobs=real(other_tops),
        teacher_logprobs=real(teacher),
        teacher_index=torch.tensor(index),
    )
    for name, value in more.items():
        setattr(made, name, real(value))
    return made


def test_forward_kl_and_its_metrics_by_hand():
    """P_T = ½, ¼ and ¼ for the rest against P_S = ¼, ½, ¼: ½ log 2 − ¼ log 2; then P_T = P_S."""
    half, quarter = math.log(0.5), math.log(0.25)
    algorithm = Distillation(config(teacher_server_urls=TWO | {"law": "http://localhost:8003"}))
    made = inputs([quarter, half], [half, half], [[half], [quarter]], [[quarter], [quarter]], [1, 0], advantages=[3.0, 0.5])
    output = algorithm.loss(made)
    ((loss, denominator),) = output.losses
    assert denominator == "tokens" and loss.item() == pytest.approx(3 * 0.25 * math.log(2))
    entropy = 1.5 * math.log(2)
    expected = {
        "jsd": (0.25 * math.log(2), 2),
        "entropy": (0.5, 2),
        "teacher_entropy": (2 * entropy, 2),
        "teacher_jsd/code": (0.25 * math.log(2), 1),
        "teacher_jsd/math": (0, 1),
        "teacher_jsd/law": (0, 0),
        "teacher_entropy/math": (entropy, 1),
        "teacher_entropy/code": (entropy, 1),
        "teacher_entropy/law": (0, 0),
        "teacher_token_frac/math": (1, 2),
        "teacher_token_frac/code": (1, 2),
        "teacher_token_frac/law": (0, 2),
    }
    assert output.metrics.keys() == expected.keys()
    for name, pair in expected.items():
        assert [float(part) for part in output.metrics[name]] == pytest.approx(pair, abs=1e-12), name


def test_policy_gradient_by_hand():
    """Advantages log ½ − log ¼ and log ⅛ − log ¼, weights 1 and 2; ratios 1.5, over 1.2 and so clipped, and 1: −A r."""
    quarter = math.log(0.25)
    made = inputs([quarter] * 2, [math.log(0.5), math.log(0.125)], [[]] * 2, [[]] * 2, [0, 0], advantages=[1.0, 2.0])
    made.sampler_logprobs = torch.tensor([quarter - math.log(1.5), quarter], dtype=torch.float64)
    output = Distillation(config(loss="policy_gradient")).loss(made)
    ((loss, denominator),) = output.losses
    assert denominator == "tokens" and loss.item() == pytest.approx(-1.2 * math.log(2) + 2 * math.log(2))
    (slope,) = torch.autograd.grad(loss, made.logprobs)
    np.testing.assert_allclose(slope.numpy(), [0, 2 * math.log(2)], atol=1e-12)
    # What it follows, KL(student ‖ teacher), over the token and the rest: ¼ log(¼/½) + ¾ log(¾/½), ¼ log 2 + ¾ log(6/7)
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5) + 0.25 * math.log(2) + 0.75 * math.log(6 / 7)
    assert float(output.metrics["jsd"][0]) == pytest.approx(expected)
    assert float(output.metrics["clip_ratio/high_mean"][0]) == 1


def test_masked_positions_leave_numerator_and_denominator():
    """A step whose second position is unknown is the step in which it never was."""
    ids, logprobs = [[3, 1], [8, 6], [9, 0]], [[-1, -2], [-1.5, -3], [-0.5, -4]]
    known, all_known = (said(mask, [-0.5] * 3, ids, logprobs) for mask in ([True, False, True], [True] * 3))
    algorithm = Distillation(config())
    (masked,), (whole,) = (algorithm.samples(scored(scores)) for scores in (known, all_known))
    step = pack_step(1, StepPlan([[[0]]]), [masked], {}, ("math",))
    row, full = step.rows[0][0], pack_row([whole], teachers=("math",))
    assert step.totals.tokens == 2 and step.totals.forwarded_tokens == 5
    for name in ("targets", "token_index", "sampler_logprobs", "top_ids", "top_logprobs", "teacher_logprobs", "teacher_index"):
        np.testing.assert_array_equal(getattr(row, name), getattr(full, name)[[0, 2]], err_msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("beta", "tail"), [(0.0, True), (0.0, False), (0.4, True), (0.4, False), (1.0, True)])
def test_loss_gradients_and_metrics_agree_with_trl(beta: float, tail: bool):
    from trl.experimental.async_distillation import async_distillation_trainer as peer

    terms, width, vocabulary, k, temperature = 60, 16, 40, 5, 1.3
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(terms, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).mul_(0.5).requires_grad_()
    teacher = torch.randn(terms, vocabulary, generator=generator).mul_(2).log_softmax(-1)
    targets = torch.where(torch.arange(terms) % 2 == 0, teacher.argmax(-1), torch.arange(terms) % vocabulary)
    owner = torch.arange(terms) % 3 // 2  # of two teachers
    likeliest, realised = teacher.topk(k), teacher.gather(-1, targets[:, None])

    among = (likeliest.indices == targets[:, None]).any(-1, keepdim=True)
    ids = torch.cat([likeliest.indices, targets[:, None]], 1)
    theirs = torch.cat([likeliest.values, realised], 1)
    mask = torch.cat([torch.ones(terms, k, dtype=torch.bool), ~among], 1)
    if beta:
        ids, theirs, mask = peer._narrow_top1_actual_support(ids, theirs, targets, mask, beta)
    sums = peer._jsd_loss_chunk(hidden, weight, None, 1.0, None, ids, theirs, mask, beta, temperature, tail, owner, 2)
    their_slopes = torch.autograd.grad(sums[0] / terms, [hidden, weight])

    made = config(beta=beta, teacher_top_k=k, add_tail_bucket=tail, teacher_temperature=temperature, teacher_server_urls=TWO)
    own = likeliest.indices[:, : made.teacher_tops]
    own = own.masked_fill(own == targets[:, None], -1)
    outputs = token_logprobs(hidden, weight, targets, temperature=made.loss_temperature, top_ids=own)
    given = likeliest.values[:, : made.teacher_tops].masked_fill(own < 0, -math.inf)
    none = torch.zeros(terms)
    output = Distillation(made).loss(
        LossInputs(
            outputs.logprobs, outputs.entropy, outputs.argmax_hit, none, none + 1, none.long(), outputs.top_logprobs, given,
            realised[:, 0], owner,
        )
    )  # fmt: skip
    loss = output.losses[0][0] / terms
    assert loss.item() == pytest.approx(sums[0].item() / terms, abs=1e-6) and abs(loss.item()) > 1e-6
    for ours, other in zip(torch.autograd.grad(loss, [hidden, weight]), their_slopes, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)
    values = [sum_ / terms for sum_ in sums[1:4]]
    for name, value in zip(("jsd", "entropy", "teacher_entropy"), values, strict=True):
        numerator, denominator = output.metrics[name]
        assert float(numerator / denominator) == pytest.approx(float(value), abs=1e-6), name
    for number, name in enumerate(made.teachers):
        tokens, jsd, entropy = (float(value) for value in sums[4].view(2, 3)[number])
        for metric, numerator, denominator in (
            (f"teacher_jsd/{name}", jsd, tokens),
            (f"teacher_entropy/{name}", entropy, tokens),
            (f"teacher_token_frac/{name}", tokens, terms),
        ):
            ours_n, ours_d = output.metrics[metric]
            assert float(ours_n / ours_d) == pytest.approx(numerator / denominator, abs=1e-6), metric
