"""Teachers: what is asked of them and read from them, what they are refused for at the start, and where rows go."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from tests.support.distillation import NamingTokenizer, built, distillation_config, group, rollout, rows, scoring
from tests.support.stub_server import StubServer
from tests.support.stub_teacher import StubTeacher, logprob_table
from trainers.data import Rows, check_columns
from trainers.errors import DatasetError, RolloutFailures, ServerCapabilityError, ServerError
from trainers.metrics import MetricBag
from trainers.rollouts.teacher_client import TeacherNeeds
from trainers.types import Rollout, TeacherScores

TOP_K = 8


def check_scores(one: Rollout, scores: list[TeacherScores], table: np.ndarray, top_k: int) -> None:
    """Against the teacher's table, token by token."""
    assert one.reconciled is not None and len(scores) == len(one.reconciled.sequences)
    for sequence, score in zip(one.reconciled.sequences, scores, strict=True):
        trained = np.flatnonzero(sequence.loss_mask)
        assert score.known.all() and score.ids.shape == score.logprobs.shape == (len(trained), top_k)
        for number, at in enumerate(trained):
            row, target = table[sequence.token_ids[at - 1]], sequence.token_ids[at]
            likeliest = [token for token in np.argsort(-row)[:top_k] if token != target]
            listed = score.ids[number][score.ids[number] >= 0]
            assert listed.tolist() == likeliest
            np.testing.assert_allclose(score.logprobs[number][: len(listed)], row[listed], rtol=1e-6)
            assert np.isinf(score.logprobs[number][len(listed) :]).all()
            assert score.target_logprobs[number] == pytest.approx(row[target], rel=1e-6)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(("beta", "top_k"), [(0.0, TOP_K), (0.5, 1), (1.0, 0)])
async def test_scores_are_the_teachers_at_its_temperature(generate: bool, beta: float, top_k: int) -> None:
    metrics = MetricBag()
    stub, one = StubTeacher(seed=3, generate=generate), rollout(turns=2)
    async with scoring(stub, beta=beta, teacher_temperature=2.0, metrics=metrics) as scorer:
        await scorer.score(group(one))
    assert one.failed is None and one.teacher_scores is not None
    assert [score.teacher for score in one.teacher_scores] == ["t0"]
    check_scores(one, one.teacher_scores, logprob_table(3, 2.0), top_k)
    assert metrics.values()["teacher_score_s/t0"] == pytest.approx(one.teacher_scores[0].score_s)
    request = stub.requests[-1]
    sampling = request if not generate else request["sampling_params"]
    assert sampling["prompt_logprobs"] == top_k and sampling["max_tokens"] == 1, "no more is asked for than is needed"


async def test_every_teacher_gets_its_own_rows() -> None:
    stubs = [StubTeacher(seed=0), StubTeacher(seed=1)]
    async with scoring(*stubs) as scorer:
        ones = [rollout(seed, teacher) for seed, teacher in enumerate(["t1", "t0", "t1"])]
        await asyncio.gather(*(scorer.score(group(one)) for one in ones))
    for one, seed in zip(ones, (1, 0, 1), strict=True):
        assert one.teacher_scores is not None
        check_scores(one, one.teacher_scores, logprob_table(seed), TOP_K)


@pytest.mark.parametrize("loss", [{"beta": 1.0, "exact_reverse_kl": True}, {"loss": "policy_gradient"}])
async def test_chosen_ids_are_asked_for_where_the_server_can(loss: dict[str, Any]) -> None:
    exact = "exact_reverse_kl" in loss
    stub, one = StubTeacher(seed=2, chosen=True), rollout(turns=2, tops=TOP_K if exact else 0)
    async with scoring(stub, **loss) as scorer:
        await scorer.score(group(one))
    assert one.teacher_scores is not None and one.reconciled is not None
    (score,), (sequence,) = one.teacher_scores, one.reconciled.sequences
    table, trained = logprob_table(2), np.flatnonzero(sequence.loss_mask)
    rows = table[sequence.token_ids[trained - 1]]
    targets = sequence.token_ids[trained]
    np.testing.assert_allclose(score.target_logprobs, rows[np.arange(len(rows)), targets], rtol=1e-6)
    if exact:
        asked = np.concatenate([turn.top_ids for turn in one.turns if turn.top_ids is not None])
        asked = np.where(asked == targets[:, None], -1, asked)
        np.testing.assert_array_equal(score.ids, asked)
        assert (asked < 0).any(), "no realised token among the student's own"
        wanted = np.where(asked < 0, -np.inf, np.take_along_axis(rows, np.maximum(asked, 0), 1))
        np.testing.assert_allclose(score.logprobs, wanted, rtol=1e-6)
    else:
        assert score.ids.shape == (len(trained), 0)


async def test_a_policy_gradient_does_with_the_sampled_logprob_alone() -> None:
    stub, one = StubTeacher(seed=2), rollout()
    async with scoring(stub, loss="policy_gradient") as scorer:
        await scorer.score(group(one))
    assert one.teacher_scores is not None
    check_scores(one, one.teacher_scores, logprob_table(2), 0)


async def test_what_the_teacher_says_nothing_of_is_not_known() -> None:
    stub, one = StubTeacher(), rollout()
    async with scoring(stub) as scorer:
        stub.says_nothing_of = {6, 8}
        await scorer.score(group(one))
    assert one.teacher_scores is not None
    assert np.flatnonzero(~one.teacher_scores[0].known).tolist() == [1, 3]  # five tokens are the prompt's


async def test_ids_that_are_padding_are_left_out() -> None:
    """A teacher's logits may have more columns than the tokenizer has tokens."""
    small = NamingTokenizer(dict.fromkeys(range(200, 300)))
    stub, one = StubTeacher(), rollout()
    async with scoring(stub, tokenizer=small, load_tokenizer=lambda root: small) as scorer:
        await scorer.score(group(one))
    assert one.teacher_scores is not None
    ids, logprobs = one.teacher_scores[0].ids, one.teacher_scores[0].logprobs
    assert ids.max() < 200 and (ids < 0).any() and np.isinf(logprobs[ids < 0]).all()


@pytest.mark.parametrize(
    ("stub", "config", "message"),
    [
        ({"max_model_len": 64}, {}, r"takes 64 tokens and the student's servers 64.*--max-model-len 65"),
        ({"max_logprobs": 4}, {}, r"fewer than 8 log-probabilities a token: start it with --max-logprobs -1"),
        ({"lists": 3}, {}, r"fewer than 8 log-probabilities a token: start it with --max-logprobs -1 \(it sent [23] beside"),
        ({"by_text": True}, {}, r"by their text: their ids are needed"),
        ({"applies_temperature": False}, {"teacher_temperature": 2.0}, r"at temperature 1.*teacher_temperature=1"),
        ({}, {"beta": 0.5, "exact_reverse_kl": True}, r"does not score chosen ids.*requires the V2 model runner"),
        ({"generate": False}, {"beta": 1.0, "exact_reverse_kl": True}, r"--enable-scale-out"),
    ],
)
async def test_a_teacher_that_cannot_score_is_refused_at_the_start(
    stub: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServerCapabilityError, match=r"teacher `t0` \(http.*" + message):
        async with scoring(StubTeacher(**stub), **config):
            pass


async def test_a_temperature_of_one_needs_nothing_special() -> None:
    async with scoring(StubTeacher(applies_temperature=False)) as scorer:
        assert not scorer.pending


async def test_a_teacher_that_is_not_there_is_named() -> None:
    stub = StubTeacher()
    async with stub.run():
        url = stub.url
    student = StubServer()
    async with student.run():
        with pytest.raises(ServerError, match=rf"teacher `here` \({url}\): no answer"):
            await built(student, {"here": url}, rows("here"), vllm_server_timeout=0.1)


async def test_a_teacher_that_never_scores_is_not_waited_for_without_end() -> None:
    stub = StubTeacher()
    stub.faults.append("hang")
    with pytest.raises(ServerError, match=r"teacher `t0` \(http.*failed at the first sequence.*: no answer within"):
        async with scoring(stub, vllm_server_timeout=1.0):
            pass


# Vocabulary

OTHER = {7: "x7", 290: None}


async def test_another_vocabulary_is_refused_with_the_first_ids() -> None:
    with pytest.raises(ServerCapabilityError, match=r"2 of 300 ids differ: 7 is 't7' and 'x7', 290 is 't290' and nothing"):
        async with scoring(
            StubTeacher(root="/somewhere"), tokenizer=NamingTokenizer(), load_tokenizer=lambda root: NamingTokenizer(OTHER)
        ):
            pass


async def test_the_servers_own_text_tells_where_there_are_no_files(caplog: pytest.LogCaptureFixture) -> None:
    student = NamingTokenizer()
    with caplog.at_level(logging.WARNING):
        async with scoring(StubTeacher(vocabulary=student.vocabulary), tokenizer=student):
            pass
    assert not caplog.records
    with pytest.raises(ServerCapabilityError, match=r"ids differ: 7 is 't7' and 'x7', 290 is 't290' and ''"):
        async with scoring(StubTeacher(vocabulary=NamingTokenizer(OTHER).vocabulary), tokenizer=student):
            pass


async def test_a_vocabulary_that_cannot_be_told_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with scoring(StubTeacher(), tokenizer=NamingTokenizer()):
            pass
    (record,) = caplog.records
    assert "teacher `t0`" in record.getMessage() and "/detokenize answered 404" in record.getMessage()


# Routing

TWO = {"math": "http://127.0.0.1:1", "code": "http://127.0.0.1:2"}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([{"prompt": "p"}], r"no column `teacher_id`; it has: prompt.*math, code"),
        (rows("math", "code", "maths"), r"row 2 of the dataset has `teacher_id` 'maths': name one of the teachers math, code"),
        (rows("math", None), r"row 1 of the dataset has no `teacher_id`"),
        (rows("math", ["code"]), r"row 1 of the dataset has `teacher_id` \['code'\]: name one of the teachers math, code"),
    ],
)
async def test_a_row_without_a_teacher_is_found_before_the_first_request(dataset: list[dict[str, Any]], message: str) -> None:
    student = StubServer()
    async with student.run():
        with pytest.raises(DatasetError, match=message):
            await built(student, TWO, dataset)
        assert not student.requests


def test_one_teacher_has_every_row_whatever_it_says() -> None:
    config = distillation_config(teacher_server_urls={"only": "http://127.0.0.1:1"})
    check_columns(Rows([{"prompt": "p"}], "rows"), config)
    check_columns(Rows(rows("another"), "rows"), config)


def test_a_dataset_with_columns_is_checked_by_its_column() -> None:
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_list(rows("math", "code", "physics"))
    config = distillation_config(teacher_server_urls=TWO)
    with pytest.raises(DatasetError, match="row 2 of the dataset has `teacher_id` 'physics'"):
        check_columns(Rows(given, "rows"), config)
    check_columns(Rows(given, "rows", max_rows=2), config)


class Streamed:
    def __iter__(self):
        return iter(rows("math", "math", "art"))


async def test_a_row_of_a_stream_is_checked_as_it_comes() -> None:
    student, math, code = StubServer(), StubTeacher(), StubTeacher()
    async with student.run(), math.run(), code.run():
        engine = await built(student, {"math": math.url, "code": code.url}, Streamed())
        engine.start()
        engine.synced(0)
        try:
            with pytest.raises(DatasetError, match="row 2 of the dataset has `teacher_id` 'art'"):
                await asyncio.wait_for(engine.step(1, 0), 60)
        finally:
            await engine.close()


@pytest.mark.parametrize("urls", [{"a": "http://h:1", "b": "http://h:1/v1"}, {"a b": "http://h:1"}, {}])
def test_teachers_that_cannot_be_told_apart_are_refused(urls: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"named twice|cannot name a teacher|no teacher is given"):
        distillation_config(teacher_server_urls=urls)


def test_needs_follow_the_objective() -> None:
    def needs(**changes: Any) -> tuple[int, bool]:
        found = TeacherNeeds.of(distillation_config(**changes))
        return found.top_k, found.chosen

    assert needs() == (8, False)
    assert needs(beta=0.3) == (1, False)
    assert needs(beta=1.0) == (0, False)
    assert needs(beta=1.0, exact_reverse_kl=True, teacher_top_k=5) == (5, True)
    assert needs(loss="policy_gradient") == (0, False)


# Bounds and failure: see also test_teacher_outage


async def test_requests_at_once_are_bounded() -> None:
    stub = StubTeacher()
    stub.delay_s = 0.02
    async with scoring(stub, teacher_concurrency=3) as scorer:
        ones = [rollout(seed) for seed in range(20)]
        await asyncio.gather(*(scorer.score(group(one)) for one in ones))
    assert stub.most_at_once == 3 and all(one.teacher_scores for one in ones)


async def test_a_refused_rollout_fails_alone_and_too_many_fail_the_run() -> None:
    stub, good = StubTeacher(), StubTeacher()
    async with scoring(stub, good) as scorer:
        stub.faults.extend([400] * 3)
        ones = [rollout(seed, "t0") for seed in range(40)]
        for one in ones:
            await scorer.score(group(one))
        assert [one.failed is not None for one in ones] == [True] * 3 + [False] * 37
        assert ones[0].failed is not None and ones[0].failed.startswith("teacher: teacher `t0` (http")
        scorer.check(final=True)
        stub.faults.extend([400] * 2)
        await scorer.score(group(rollout(98, "t0")))
        with pytest.raises(
            RolloutFailures, match=r"5 of the last 42 rollouts of teacher `t0` .*max_teacher_failure_frac = 0.1"
        ):
            await scorer.score(group(rollout(99, "t0")))


async def test_few_failures_are_judged_at_the_end() -> None:
    stub = StubTeacher()
    async with scoring(stub) as scorer:
        stub.faults.append(400)
        await scorer.score(group(rollout()))
        scorer.check()
        with pytest.raises(RolloutFailures, match=r"1 of the last 1 rollouts of teacher `t0`.*told to answer 400"):
            scorer.check(final=True)


async def test_an_error_is_tried_again_within_one_budget() -> None:
    stub, metrics = StubTeacher(), MetricBag()
    async with scoring(stub, metrics=metrics, vllm_server_timeout=20.0) as scorer:
        stub.faults.extend([500, "reset"])
        one = rollout()
        await scorer.score(group(one))
        assert one.teacher_scores and metrics.values()["rollout/vllm_retry_total"] == 2
