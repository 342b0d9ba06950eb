"""The scoring pool by itself: sums, failures and what they say, slots, and functions that never return."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.rollout_runs import running
from tests.support.stub_server import StubServer
from trainers.errors import ConfigError, NoProgress
from trainers.metrics import MetricBag
from trainers.rewards import accuracy_reward, format_reward
from trainers.rollouts.scoring import Scorer
from trainers.types import Prompt, Rollout, RolloutGroup


def group_of(*texts: str, **columns: Any) -> RolloutGroup:
    prompt = Prompt(0, 0, [{"role": "user", "content": "?"}], columns, np.zeros(1, np.int32))
    return RolloutGroup(prompt, [Rollout(prompt, completion=[{"role": "assistant", "content": text}]) for text in texts])


async def scored(group: RolloutGroup, *functions: Any, weights: list[float] | None = None) -> tuple[list[Rollout], MetricBag]:
    metrics = MetricBag()
    scorer = Scorer(functions, weights, metrics)
    try:
        await scorer.score(group)
    finally:
        await scorer.close()
    return group.rollouts, metrics


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


async def test_weights_none_and_what_others_gave_are_summed() -> None:
    async def sometimes(completions: list[Any]) -> list[float | None]:
        return [None, 1.0, None]

    group = group_of("a", "bb", "ccc")
    group.rollouts[0].rewards["Room"] = 5.0  # an environment's
    group.rollouts[1].rewards["Room"] = None
    group.rollouts[2].reward = 0.25  # a custom `generate_one`
    rollouts, metrics = await scored(group, length, sometimes, weights=[2.0, -1.0])
    assert [rollout.reward for rollout in rollouts] == [7.0, 3.0, 6.25]
    assert rollouts[0].rewards == {"Room": 5.0, "length": 1.0, "sometimes": None}
    values = metrics.drain()
    assert values["rewards/sometimes"] == (1.0, 1.0) and values["rewards/sometimes_none_frac"] == (2.0, 3.0)
    assert values["rewards/length_call_s"][1] == values["rewards/sometimes_call_s"][1] == 1.0


async def test_without_functions_the_environment_decides_alone() -> None:
    group = group_of("a", "b")
    group.rollouts[0].rewards["Room"] = 1.0
    rollouts, metrics = await scored(group)
    assert rollouts[0].reward == 1.0 and np.isnan(rollouts[1].reward) and rollouts[1].failed is None
    assert metrics.drain() == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "a word", [1.0]])
async def test_what_is_no_finite_number_fails_its_rollout_alone(bad: Any) -> None:
    def reward(completions: list[Any]) -> list[Any]:
        return [bad if completion[0]["content"] == "bad" else 1.0 for completion in completions]

    rollouts, _ = await scored(group_of("good", "bad", "good"), reward)
    assert [rollout.failed is None for rollout in rollouts] == [True, False, True]
    assert str(rollouts[1].failed).startswith("reward: reward") and [r.reward for r in rollouts[::2]] == [1.0, 1.0]


async def test_a_sum_that_overflows_fails_the_rollout() -> None:
    group = group_of("a", "b")
    group.rollouts[0].reward = float("inf")
    rollouts, _ = await scored(group, length)
    assert "`generate_one` set is inf" in str(rollouts[0].failed) and rollouts[1].reward == 1.0


@pytest.mark.parametrize("answer", [None, 5, [1.0], [1.0] * 4])
async def test_an_answer_that_is_no_list_of_the_right_length_fails(answer: Any) -> None:
    def reward(completions: list[Any]) -> Any:
        return answer

    rollouts, _ = await scored(group_of("a", "b", "c"), reward)
    if answer == [1.0]:  # right for one completion at a time
        assert [rollout.reward for rollout in rollouts] == [1.0] * 3
    else:
        assert all(
            re.fullmatch(r"reward: reward: ValueError: returned .*; a reward function returns a list .* per completion", text)
            for text in (str(rollout.failed) for rollout in rollouts)
        ), rollouts[0].failed


def parse(text: str) -> Any:
    return json.loads(text)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_cause_names_the_users_lines_not_the_librarys(kind: str) -> None:
    def reward(completions: list[Any]) -> list[float]:
        return [parse(completion[0]["content"]) for completion in completions]

    async def asynchronous(completions: list[Any]) -> list[float]:
        return reward(completions)

    rollouts, _ = await scored(group_of("1", "{", "3"), reward if kind == "sync" else asynchronous)
    assert [rollout.reward for rollout in rollouts[::2]] == [1.0, 3.0]
    failed = str(rollouts[1].failed)
    assert re.fullmatch(
        r"reward: \w+: JSONDecodeError: .* \(\S+test_scoring.py:\d+ in \S+, \S+test_scoring.py:\d+ in parse\)", failed
    ), failed


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), asyncio.CancelledError(), KeyboardInterrupt()])
async def test_what_python_takes_for_itself_fails_a_rollout_like_any_error(kind: str, error: BaseException) -> None:
    def reward(completions: list[Any]) -> list[float]:
        raise error

    async def asynchronous(completions: list[Any]) -> list[float]:
        raise error

    rollouts, _ = await asyncio.wait_for(scored(group_of("a", "b"), reward if kind == "sync" else asynchronous), 30)
    assert all(type(error).__name__ in str(rollout.failed) for rollout in rollouts)
    assert all("test_scoring.py" in str(rollout.failed) for rollout in rollouts)


async def test_a_wrong_configuration_ends_the_run_and_is_no_failed_rollout() -> None:
    with pytest.raises(ConfigError, match="accuracy_reward needs a dataset column"):
        await scored(group_of("a", "b"), accuracy_reward)


async def test_names_do_not_collide_with_one_another_nor_with_derived_ones() -> None:
    def length_call_s(completions: list[Any]) -> list[float]:
        return [7.0] * len(completions)

    words = functools.partial(format_reward, pattern="b")
    rollouts, _ = await scored(group_of("b"), length, length, length_call_s, words, words)
    assert list(rollouts[0].rewards) == ["length", "length_2", "length_call_s_2", "format_reward", "format_reward_2"]


async def test_a_full_pool_is_measured_and_the_call_that_hangs_is_named() -> None:
    release = threading.Event()

    def judge(completions: list[Any]) -> list[float]:
        release.wait(60)
        return [1.0] * len(completions)

    metrics = MetricBag()
    scorer = Scorer([length, judge], None, metrics, workers=1)
    tasks = [asyncio.create_task(scorer.score(group_of("a", "b"))) for _ in range(3)]
    try:
        while not scorer.functions[1].calls:
            await asyncio.sleep(0.01)
        assert re.fullmatch(
            r"scoring: 3 groups wait for the reward functions; `judge` has not returned for \d+ s, called with 2 completions",
            scorer.describe(),
        )
    finally:
        release.set()
        await asyncio.gather(*tasks)
        await scorer.close()
    assert (waits := metrics.drain())["rollout/score_block_s"][1] == 2.0 and waits["rollout/score_wait_s"][1] == 3.0
    assert scorer.describe() == "scoring: 0 groups wait for the reward functions"


async def test_functions_that_hold_connections_are_closed_on_their_own_loop() -> None:
    loops: list[Any] = []

    class Judge:
        async def __call__(self, completions: list[Any]) -> list[float]:
            loops.append(asyncio.get_running_loop())
            return [1.0] * len(completions)

        async def aclose(self) -> None:
            loops.append(asyncio.get_running_loop())

    await scored(group_of("a"), Judge())
    assert len(loops) == 2 and loops[0] is loops[1] and loops[0] is not asyncio.get_running_loop()


async def test_a_function_that_never_returns_ends_the_run_by_the_watchdog() -> None:
    release = threading.Event()

    def stuck(completions: list[Any]) -> list[float]:
        release.wait(120)
        return [0.0] * len(completions)

    async with running(StubServer(), [stuck], rollout_worker_timeout=1.0) as engine:
        request = asyncio.create_task(engine.step(1, 0))
        await asyncio.sleep(0)
        engine.trainer_waits()
        try:
            with pytest.raises(NoProgress, match=r"nothing moved for 1 s .*`stuck` has not returned for \d+ s"):
                await asyncio.wait_for(request, 60)
        finally:
            release.set()
