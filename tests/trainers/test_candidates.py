"""Top logprobs and candidate sets, from answers that vLLM's own classes wrote to the head's probabilities.

No CPU server returns candidate sets; what it would send is built here as the server builds it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from trainers import attention
from trainers.algorithms import SamplerNeeds
from trainers.algorithms.sequences import rollout_samples
from trainers.batch import PackedBatch
from trainers.head import token_logprobs
from trainers.losses import loss_inputs
from trainers.packing import pack_row
from trainers.policy_losses import Bounds, centered_loss
from trainers.rollouts.answers import read_answer
from trainers.rollouts.protocol import RequestFailed, SamplingForm, request_body
from trainers.rollouts.reconcile import reconcile
from trainers.types import Prompt, Rollout, TurnRecord

VOCABULARY, LENGTH, TOP_K = 12, 12, 3
PROMPT = np.array([5, 9], np.int32)
FORM = SamplingForm(top_k=4, top_logprobs=TOP_K, candidates=True)
# Endpoint (or "arrays": the plugin's answers of generate), flat, `logprobs`.
FORMS = [
    ("generate", True, TOP_K + 1),
    ("generate", False, TOP_K + 1),
    ("arrays", True, TOP_K + 1),
    ("arrays", False, TOP_K + 1),  # which the plugin leaves as they are
    ("completions", False, TOP_K),
]
SAMPLED = [("generate", False), ("generate", True), ("arrays", True)]


def make_cases() -> list[dict[str, Any]]:
    """At every case position i samples token i, so that every rank is sampled once, from the same scores everywhere."""
    rng = np.random.default_rng(0)
    scores = np.log(rng.dirichlet(np.ones(VOCABULARY)))
    scores[7] = scores[2]  # a tie
    narrow = np.where(np.isin(np.arange(VOCABULARY), [1, 8]), np.log(0.5), -np.inf)
    rows = {"wide": [scores] * LENGTH, "narrow": [narrow, narrow]}
    sampled = {"wide": list(range(LENGTH)), "narrow": [8, 1]}
    mask = {"wide": None, "narrow": [[1, 8], [1, 8]]}
    cases = [{"endpoint": endpoint, "flat": flat, "top": top, "name": name} for name in rows for endpoint, flat, top in FORMS]
    cases += [{"endpoint": endpoint, "flat": flat, "top": 0, "name": "wide"} for endpoint, flat in SAMPLED]
    for case in cases:
        name = case["name"]
        table = [[None if np.isinf(score) else float(score) for score in row] for row in rows[name]]
        case |= {"sampled": sampled[name], "scores": table, "mask": mask[name] if case["endpoint"] == "generate" else None}
    return cases


@cache
def bodies() -> dict[tuple[str, str, bool, int], tuple[dict[str, Any], bytes]]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    cases = make_cases()
    command = [sys.executable, "-m", "tests.support.vllm_answers"]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    keys = [(case["name"], case["endpoint"], case["flat"], case["top"]) for case in cases]
    return {key: (case, body.encode()) for key, case, body in zip(keys, cases, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize(("endpoint", "flat", "top"), FORMS)
def test_the_top_logprobs_do_not_depend_on_the_sampled_token(endpoint: str, flat: bool, top: int) -> None:
    case, body = bodies()["wide", endpoint, flat, top]
    turn = read_answer(SamplingForm(top_logprobs=TOP_K), body, PROMPT, 3)
    scores = np.array(case["scores"][0], np.float32)
    likeliest = sorted(range(VOCABULARY), key=lambda i: (-scores[i], i))[:TOP_K]
    assert turn.output_ids.tolist() == list(range(LENGTH)), "every token must have been sampled once"
    np.testing.assert_array_equal(turn.output_logprobs, scores)
    assert turn.top_ids is not None and turn.top_logprobs is not None
    assert turn.top_ids.tolist() == [likeliest] * LENGTH and turn.top_ids.dtype == np.int32
    np.testing.assert_array_equal(turn.top_logprobs, [scores[likeliest]] * LENGTH)
    assert turn.candidate_ids is None and turn.candidate_counts is None


@pytest.mark.parametrize(("endpoint", "flat"), SAMPLED)
def test_without_need_the_sampled_logprob_alone_is_taken(endpoint: str, flat: bool) -> None:
    case, body = bodies()["wide", endpoint, flat, 0]
    turn = read_answer(SamplingForm(), body, PROMPT, 3)
    np.testing.assert_array_equal(turn.output_logprobs, np.array(case["scores"][0], np.float32))
    assert turn.top_ids is None and turn.candidate_ids is None and [span.version for span in turn.spans] == [3]


@pytest.mark.parametrize(("endpoint", "flat", "top"), FORMS)
def test_tokens_beyond_the_candidates_are_none_of_the_top(endpoint: str, flat: bool, top: int) -> None:
    turn = read_answer(FORM, bodies()["narrow", endpoint, flat, top][1], PROMPT, 3)
    assert turn.top_ids is not None and turn.top_ids.tolist() == [[1, 8, -1]] * 2
    assert turn.top_logprobs is not None
    np.testing.assert_allclose(turn.top_logprobs, [[np.log(0.5), np.log(0.5), -np.inf]] * 2, rtol=1e-6)


def test_the_plugin_writes_arrays_where_it_is_asked_to() -> None:
    told = {key: json.loads(body)["choices"][0]["logprobs"] for key, (_, body) in bodies().items()}
    arrays = {key[1:] for key, logprobs in told.items() if "arrays" in logprobs}
    assert arrays == {("arrays", True, TOP_K + 1), ("arrays", True, 0)}
    assert set(told["wide", "arrays", True, 0]["arrays"]) == {"columns", "logprobs"}


def test_arrays_that_are_cut_short_fail_their_rollout() -> None:
    body = json.loads(bodies()["wide", "arrays", True, TOP_K + 1][1])
    arrays = body["choices"][0]["logprobs"]["arrays"]
    for name in ("logprobs", "ids"):
        for cut in (arrays[name][:-8], arrays[name][: 4 * len(arrays[name]) // 8]):
            broken = json.dumps({"choices": [body["choices"][0] | {"logprobs": {"arrays": arrays | {name: cut}}}]}).encode()
            with pytest.raises(RequestFailed, match="the server sent"):
                read_answer(SamplingForm(top_logprobs=TOP_K), broken, PROMPT, 3)


def narrow_turn() -> TurnRecord:
    return read_answer(FORM, bodies()["narrow", "generate", True, TOP_K + 1][1], PROMPT, 3)


def test_candidate_sets_are_read_as_the_server_writes_them() -> None:
    turn = narrow_turn()
    assert turn.candidate_ids is not None and turn.candidate_counts is not None
    assert turn.candidate_ids.tolist() == [1, 8, 1, 8] and turn.candidate_counts.tolist() == [2, 2]


def test_a_server_without_candidate_sets_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    from trainers.rollouts import answers

    answers._warn_of_no_candidates.cache_clear()
    body = bodies()["wide", "generate", True, TOP_K + 1][1]
    for _ in range(3):
        turn = read_answer(FORM, body, PROMPT, 3)
        assert turn.candidate_ids is not None and turn.candidate_counts is not None
        assert not len(turn.candidate_ids) and turn.candidate_counts.tolist() == [0] * LENGTH
    (record,) = caplog.records
    assert "--return-sampling-mask" in record.message and "biased" in record.message


def test_from_the_answer_to_the_heads_probabilities() -> None:
    """A turn with candidates and one without become two samples of one row; the head normalises each as it was sampled."""
    narrow = narrow_turn()
    wide = read_answer(SamplingForm(top_logprobs=TOP_K), bodies()["wide", "generate", True, TOP_K + 1][1], PROMPT, 3)
    prompt = Prompt(0, 0, [], {}, PROMPT)
    samples = [
        sample
        for turn in (narrow, wide)
        for sample in rollout_samples(Rollout(prompt, [turn], reconciled=reconcile([turn], 1024)), 1.0)
    ]
    batch = PackedBatch.from_row(pack_row(samples), torch.device("cpu"), torch.float64)
    assert batch.candidates is not None and batch.top_ids.shape == (2 + LENGTH, TOP_K)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 + LENGTH, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 4, generator=generator, dtype=torch.float64)
    outputs = token_logprobs(hidden, weight, batch.targets, top_ids=batch.top_ids, candidates=batch.candidates, chunk=3)
    p = (hidden @ weight.T).softmax(-1)
    among_two = p[:2, [8, 1]].diagonal() / p[:2, [1, 8]].sum(-1)
    torch.testing.assert_close(outputs.logprobs[:2].exp(), among_two)
    torch.testing.assert_close(outputs.logprobs[2:].exp(), p[2:].gather(-1, batch.targets[2:, None])[:, 0])
    torch.testing.assert_close(outputs.top_logprobs[:2].exp().sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(outputs.top_logprobs[2:].exp(), p[2:].gather(-1, batch.top_ids[2:]))


def test_what_is_asked_for_follows_from_the_config() -> None:
    from trainers.algorithms import build_algorithm
    from trainers.config import GRPOConfig, SFTConfig

    def needs(**fields: Any) -> SamplerNeeds:
        return build_algorithm(GRPOConfig(model="m", dataset={"path": "d"}, **fields)).sampler_needs()  # type: ignore[arg-type]

    assert needs() == SamplerNeeds(8, False)
    assert needs(num_sampler_logprobs=3, top_k=50, top_p=0.9) == SamplerNeeds(3, True)
    assert needs(score_centering=False) == SamplerNeeds(0, False)
    assert needs(score_centering=False, top_k=50, min_p=0.1) == SamplerNeeds(0, True)
    assert build_algorithm(SFTConfig(model="m", dataset={"path": "d"})).sampler_needs() == SamplerNeeds()  # type: ignore[arg-type]


def test_a_repetition_penalty_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from trainers.config import GRPOConfig

    for penalty in (1.0, 1.2):
        config = GRPOConfig(model="m", dataset={"path": "d"}, repetition_penalty=penalty)  # type: ignore[arg-type]
        assert SamplingForm.of(config, SamplerNeeds(8, False)).repetition_penalty == penalty
    assert [record.getMessage()[:24] for record in caplog.records] == ["repetition_penalty=1.2: "]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0.9}, "top_p needs top_k"),
        ({"min_p": 0.1}, "min_p needs top_k"),
        ({"vllm_importance_sampling_clip_min": 1.5}, "would mask every token"),
        ({"vllm_importance_sampling_clip_max": 0.9}, "would mask every token"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    from trainers.config import GRPOConfig

    with pytest.raises(ValueError, match=message):
        GRPOConfig(model="m", dataset={"path": "d"}, **fields)  # type: ignore[arg-type]


@pytest.mark.server
def test_the_trainers_probabilities_are_the_real_servers(vllm_server: Any) -> None:
    """With top_k 4 the server's processed logprobs are those of the four candidates, which its top 5 then name."""
    from trainers.config import GRPOConfig
    from trainers.distributed import Ranks
    from trainers.model import build_policy, load_model

    form = SamplingForm(top_k=4, top_logprobs=5)
    with httpx.Client(base_url=vllm_server.url, headers=vllm_server.headers, timeout=60) as client:
        turns = []
        for seed, one_form in ((1, form), (2, SamplingForm(top_logprobs=5))):
            path, body = request_body(one_form, True, "policy", PROMPT, temperature=0.8, max_tokens=40, seed=seed, version=None)
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"}).raise_for_status()
            turns.append(read_answer(one_form, answer.content, PROMPT, None))
    limited = turns[0]
    assert limited.top_ids is not None and ((limited.top_ids >= 0).sum(1) == 4).all()
    limited.candidate_ids = limited.top_ids[limited.top_ids >= 0]
    limited.candidate_counts = np.full(len(limited.top_ids), 4, np.int32)
    prompt = Prompt(0, 0, [], {}, PROMPT)
    samples = [
        sample for turn in turns for sample in rollout_samples(Rollout(prompt, [turn], reconciled=reconcile([turn], 1024)), 1.0)
    ]
    cpu = torch.device("cpu")
    attention.install(cpu, torch.float32, log=False)
    config = GRPOConfig(model=str(vllm_server.model_dir), dataset={"path": "d"}, temperature=0.8)  # type: ignore[arg-type]
    policy = build_policy(load_model(config), config, Ranks(0, 1, 0, cpu, None, None))
    batch = PackedBatch.from_row(pack_row(samples), cpu)
    with torch.no_grad():
        outputs = policy(batch)
    assert len(outputs.logprobs) == sum(len(turn.output_ids) for turn in turns) > 10
    torch.testing.assert_close(outputs.logprobs, batch.sampler_logprobs, atol=1e-3, rtol=0)
    torch.testing.assert_close(outputs.top_logprobs, batch.top_logprobs, atol=1e-3, rtol=0)
    _, metrics = centered_loss(loss_inputs(outputs, batch), Bounds(0.5, 5.0, 0.8, 1.2))
    assert float(metrics["sampling/masked_mean"][0]) == 0
