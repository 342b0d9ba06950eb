"""When failures end a run: too many of them, or nothing moving any more."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.stub_server import StubServer
from tests.trainers.test_rollout_loop import by_rank, running
from trainers.errors import NoProgress, RolloutFailures
from trainers.rollouts.failures import LEAST, WINDOW, FailureWindow


def test_a_few_rollouts_are_not_judged_before_the_end() -> None:
    window = FailureWindow(0.1)
    for _ in range(LEAST - 1):
        window.add("http_400", "no")
    window.check()
    with pytest.raises(RolloutFailures, match=f"{LEAST - 1} of the last {LEAST - 1} rollouts failed"):
        window.check(final=True)
    window.add(None)
    with pytest.raises(RolloutFailures):
        window.check()


def test_exactly_the_tolerated_share_is_tolerated() -> None:
    window = FailureWindow(0.25)
    for number in range(LEAST):
        window.add("tool" if number % 4 == 0 else None)
    window.check(final=True)
    window.add("tool")
    with pytest.raises(RolloutFailures, match=r"max_rollout_failure_frac = 0\.25"):
        window.check()


def test_old_failures_are_forgotten() -> None:
    window = FailureWindow(0.1)
    for _ in range(WINDOW // 5):
        window.add("timeout")
    for _ in range(WINDOW - WINDOW // 10):
        window.add(None)
    window.check(final=True)


def test_the_most_frequent_cause_comes_first_with_its_newest_message() -> None:
    window = FailureWindow(0.0)
    for number in range(LEAST):
        window.add("reward" if number % 3 else "http_400", f"message {number}")
    with pytest.raises(RolloutFailures, match=r": 21 × reward: message 31; 11 × http_400: message 30$"):
        window.check()


async def test_a_server_that_answers_nothing_is_named_when_nothing_moves() -> None:
    stub = StubServer()
    stub.faults.extend(["hang"] * 100)
    async with running(stub, [by_rank], prompts=4, rollout_worker_timeout=1.0) as engine:
        step = asyncio.create_task(engine.step(1, 0))
        await asyncio.sleep(0)
        engine.trainer_waits()
        with pytest.raises(NoProgress, match=rf"generation waits for {stub.url}: 12 rollouts in flight, the oldest for \d s"):
            await step
