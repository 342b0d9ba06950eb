"""A teacher that dies in mid-run: the rows of others go on, its own wait, and the run ends with its name if it stays away."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from tests.support.distillation import built, group, rollout, rows, scoring
from tests.support.pools import until
from tests.support.rollout_runs import only_step, started
from tests.support.stub_server import StubServer
from tests.support.stub_teacher import StubTeacher
from trainers.errors import RolloutFailures, ServerError
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.protocol import RequestFailed, Retryable
from trainers.rollouts.teacher import Teacher
from trainers.rollouts.teacher_answers import Scored
from trainers.rollouts.teacher_client import TeacherNeeds

ROWS = rows(*(["math", "code"] * 6))


@asynccontextmanager
async def run_without_code(math: StubTeacher, code: StubTeacher, **changes: object) -> AsyncIterator[StepEngine]:
    """An engine that runs, both teachers having been there at its start, `code` no more."""
    student = StubServer()
    async with student.run(), math.run():
        async with code.run():
            engine = await built(student, {"math": math.url, "code": code.url}, ROWS, **changes)
        async with started(engine):
            yield engine


async def test_other_rows_go_on_and_the_rest_follow_when_it_is_back() -> None:
    math, code = StubTeacher(0), StubTeacher(1)
    async with run_without_code(math, code, vllm_server_timeout=60.0) as engine, AsyncExitStack() as stack:
        step = asyncio.create_task(only_step(engine))
        probes = 1
        await until(lambda: "6 rollouts outstanding" in engine.describe() and "unreachable" in engine.describe())
        told = engine.describe()
        assert len(math.scored) == probes + 6
        assert re.search(r"scoring: 6 sequences wait for teacher `code` \(http.*\), the oldest for .* \(last error: ", told), (
            told
        )
        await stack.enter_async_context(code.run(int(code.url.rpartition(":")[2])))
        found = await step
        assert found.totals.sequences == 12 and len(code.scored) == probes + 6


async def test_one_that_stays_away_ends_the_run() -> None:
    math, code = StubTeacher(0), StubTeacher(1)
    async with run_without_code(math, code, vllm_server_timeout=1.0) as engine:
        with pytest.raises(ServerError, match=rf"teacher `code` \({code.url}\) has been unreachable for .*last error: http"):
            await only_step(engine)


async def test_waiting_for_it_counts_as_progress() -> None:
    stub, told = StubTeacher(), asyncio.Event()
    async with scoring(stub, progress=told.set, vllm_server_timeout=60.0) as scorer:
        await stub.stop_listening()
        stub.faults.append("reset")
        task = asyncio.create_task(scorer.score(group(rollout())))
        await asyncio.wait_for(told.wait(), 60)
        assert scorer.pending == 1 and "unreachable" in scorer.describe()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scorer.pending == 0


async def test_the_error_that_its_requests_are_tried_again_for_is_told() -> None:
    stub = StubTeacher()
    async with scoring(stub, vllm_server_timeout=60.0) as scorer:
        stub.faults.append(500)
        task = asyncio.create_task(scorer.score(group(rollout())))
        await until(lambda: "last error" in scorer.describe())
        assert re.search(r"1 sequences wait for teacher `t0`.*\(last error: .*told to answer 500", scorer.describe())
        await task
        stub.delay_s = 0.2
        task = asyncio.create_task(scorer.score(group(rollout())))
        await until(lambda: "1 sequences wait" in scorer.describe())
        assert "last error" not in scorer.describe(), "it has answered since"
        await task


async def test_failures_of_a_teacher_are_not_those_of_rollouts() -> None:
    """`max_rollout_failure_frac` is of generation; each teacher has a window of its own."""
    student, math = StubServer(), StubTeacher()
    async with student.run(), math.run():
        urls, given = {"math": math.url}, rows(*["math"] * 40)
        engine = await built(student, urls, given, max_rollout_failure_frac=0.0, max_teacher_failure_frac=0.5)
        math.faults.extend([400] * 10)
        engine.start()
        engine.synced(0)
        try:
            found = await only_step(engine)
            assert found.totals.sequences == 30
        finally:
            await engine.close()
        engine = await built(student, urls, given, max_teacher_failure_frac=0.5)
        math.faults.extend([400] * 40)
        engine.start()
        engine.synced(0)
        try:
            with pytest.raises(RolloutFailures, match=r"rollouts of teacher `math`.*max_teacher_failure_frac = 0.5"):
                await only_step(engine)
        finally:
            await engine.close()


SAID = Scored(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32), np.zeros(1, np.float32))
BROKEN, REFUSED = Retryable("reset", "the connection ended"), RequestFailed("http_400", "no")


def answering(monkeypatch: pytest.MonkeyPatch, attempt: object, budget_s: float) -> Teacher:
    teacher = Teacher(
        "t",
        "http://127.0.0.1:1",
        TeacherNeeds(0, False, 1.0),
        budget_s=budget_s,
        at_once=4,
        failure_limit=1.0,
        on_retry=lambda cause: None,
        on_wait=lambda: None,
        first_pause_s=0.02,
    )
    monkeypatch.setattr(teacher.client, "attempt", attempt)
    return teacher


async def test_a_request_that_breaks_its_connection_while_others_are_answered_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def attempt(token_ids: np.ndarray, start: int, chosen: object) -> Scored:
        if token_ids[0]:
            raise BROKEN
        return SAID

    teacher = answering(monkeypatch, attempt, budget_s=0.5)
    task = asyncio.create_task(teacher.score(np.array([1, 2]), 1))

    async def others() -> None:
        while not task.done():
            await teacher.score(np.array([0, 2]), 1)
            await asyncio.sleep(0.002)

    await asyncio.wait_for(others(), 60)
    with pytest.raises(RequestFailed, match=r"connection ended \(given up after \d+ tries in vllm_server_timeout, 0\.5 s"):
        await task


async def test_a_refusal_says_that_the_server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[Exception] = [BROKEN, REFUSED, BROKEN]

    async def attempt(*request: object) -> Scored:
        if script:
            raise script.pop(0)
        return SAID

    teacher = answering(monkeypatch, attempt, budget_s=0.2)
    with pytest.raises(RequestFailed, match="no"):
        await teacher.score(np.array([1, 2]), 1)
    await asyncio.sleep(0.3)
    scored, _ = await teacher.score(np.array([1, 2]), 1)
    assert scored is SAID and not script
