"""A teacher that dies in mid-run: the rows of others go on, its own wait, and the run ends with its name if it stays away."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.distillation import built, group, rollout, rows, scoring
from tests.support.pools import until
from tests.support.rollout_runs import only_step, started
from tests.support.stub_server import StubServer
from tests.support.stub_teacher import StubTeacher
from trainers.errors import RolloutFailures, ServerError
from trainers.rollouts.engine import StepEngine

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
