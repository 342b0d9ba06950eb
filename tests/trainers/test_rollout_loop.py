"""The rollout loop with its scoring pool, against the stub server: hooks, rewards of every kind, failures of every kind."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.rollout_runs import by_rank, only_step, running
from tests.support.stub_server import StubServer
from trainers.errors import ConfigError, DatasetError, NoProgress, RolloutFailures
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.types import Prompt, Rollout, RolloutGroup


async def test_a_whole_epoch_becomes_one_step() -> None:
    seen: list[dict[str, Any]] = []

    def reward(
        completions: list[Any], prompts: list[Any], completion_ids: list[Any], answer: list[str], **kwargs: Any
    ) -> list[float]:
        seen.append({"completions": completions, "prompts": prompts, "ids": completion_ids, "answer": answer})
        return by_rank(completions)

    stub = StubServer()
    async with running(stub, [reward]) as engine:
        step = await only_step(engine)
    assert (step.totals.groups, step.totals.sequences, step.totals.tokens) == (4, 12, 36)
    assert all(call["answer"] == [call["answer"][0]] * 3 for call in seen)
    assert seen[0]["completions"][0] == [{"role": "assistant", "content": "42"}] and seen[0]["ids"][0] == [56, 54, 1]
    advantages = {round(float(a), 3) for a in step.rows[0][0].advantages}
    assert advantages == {-1.225, 0.0, 1.225}
    seeds = [request["sampling_params"]["seed"] for request in stub.requests]
    assert len(set(seeds)) == 12 and max(seeds) > 2**40
    metrics = step.metrics
    assert metrics["reward"] == (12.0, 12.0) and metrics["rewards/reward"] == (12.0, 12.0)
    assert metrics["completions/mean_length"] == (36.0, 12.0) and metrics["completions/clipped_ratio"] == (0.0, 12.0)
    rows = engine.drain_rows()
    assert len(rows) == 12 and rows[0]["completion"] == "42" and rows[0]["outcome"] == "kept"


async def test_none_is_not_applicable_and_all_none_is_unscorable() -> None:
    def first(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return [1.0, None, None]

    async def second(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return [1.0, 3.0, None]

    async with running(
        StubServer(), [first, second], prompts=1, reward_weights=[1.0, 0.5], reward_funcs=["a:b", "c:d"]
    ) as engine:
        step = await only_step(engine)
        rows = engine.drain_rows()
    assert [row["reward"] for row in rows] == [1.5, 1.5, None] and rows[2]["advantage"] == 0.0
    # The two scorable rewards are equal: no variance, whatever the unscorable one might have been.
    assert step is None and engine.ledger.summary == {0: {"trained": 0, "dropped": {"zero_variance": 1}}}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_that_is_no_number_fails_its_rollout_and_the_group_goes_on(bad: float) -> None:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [bad, 0.0, 1.0]

    async with running(StubServer(), [reward], prompts=1) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 2 and step.metrics["rollout/failed_total/reward"][0] == 1
    assert step.metrics["reward"] == (1.0, 2.0)


async def test_a_reward_that_raises_fails_only_the_rollouts_at_fault_and_its_traceback_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = 0

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls in (1, 2):  # the group, then its first rollout alone
            raise ValueError("cannot judge")
        return [float(calls)] * len(completions)

    async with running(StubServer(), [reward], prompts=1) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 2 and step.metrics["rollout/failed_total/reward"][0] == 1
    (record,) = [record for record in caplog.records if record.name == "trainers.rollouts.scoring"]
    assert record.exc_info is not None and 'raise ValueError("cannot judge")' in caplog.text


async def test_one_refused_request_costs_one_rollout() -> None:
    stub = StubServer()
    stub.faults.append(400)
    async with running(stub, [by_rank], prompts=1) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 2 and step.metrics["rollout/failed_total/http_400"][0] == 1


async def test_a_group_with_one_rollout_left_is_dropped_as_failed() -> None:
    stub = StubServer()
    stub.faults.extend([400, 400])
    async with running(stub, [by_rank], prompts=2) as engine:
        step = await only_step(engine)
    assert step.totals.groups == 1 and step.metrics["rollout/dropped_groups_total/failed"][0] == 1
    assert engine.ledger.state_dict()["dropped"] == {"failed": 1}


async def test_a_500_and_a_reset_are_retried_and_counted() -> None:
    stub = StubServer()
    stub.faults.extend([500, "reset"])
    async with running(stub, [by_rank], prompts=1) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 3 and step.metrics["rollout/vllm_retry_total"][0] == 2


async def test_too_many_failures_end_the_run_most_frequent_cause_first() -> None:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        raise KeyError("solution")

    stub = StubServer()
    stub.faults.append(400)
    async with running(stub, [reward], prompts=40, max_rollout_failure_frac=0.1) as engine:
        with pytest.raises(
            RolloutFailures,
            match=r"\d+ × reward: reward: KeyError: 'solution' \(\S+test_rollout_loop.py:\d+ in reward\); "
            "1 × http_400: .*told to answer 400",
        ):
            await only_step(engine)


async def test_failures_of_a_short_run_are_judged_at_its_end() -> None:
    stub = StubServer()
    stub.faults.extend([400] * 3)
    async with running(stub, [by_rank], prompts=1, max_rollout_failure_frac=0.1) as engine:
        with pytest.raises(RolloutFailures, match="3 of the last 3 rollouts failed"):
            await only_step(engine)


async def test_prompts_the_server_cannot_take_are_dropped_before_dispatch() -> None:
    stub = StubServer(max_model_len=5)  # "<p0>" has four tokens, "<p10>" five
    async with running(stub, [by_rank], prompts=12) as engine:
        step = await only_step(engine)
    assert step.totals.groups == 10 and step.metrics["rollout/dropped_groups_total/too_long"][0] == 2
    assert all(request["sampling_params"]["max_tokens"] == 1 for request in stub.requests)  # clipped to what fits


async def test_empty_and_eos_only_completions_are_ordinary() -> None:
    stub = StubServer(completion="")
    async with running(stub, [by_rank], prompts=1) as engine:
        step = await only_step(engine)
    assert step.totals.tokens == 3 and step.metrics["completions/empty_total"][0] == 3

    stub = StubServer(completion="")
    stub._ids = []  # not even EOS
    async with running(stub, [by_rank], prompts=1) as engine:
        assert await only_step(engine) is None
    assert engine.ledger.summary == {0: {"trained": 0, "dropped": {"empty": 1}}}


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_slow_judge_does_not_stop_generation(kind: str) -> None:
    release = threading.Event()

    def slow(completions: list[Any], **kwargs: Any) -> list[float]:
        release.wait(30)
        return by_rank(completions)

    async def blocking(completions: list[Any], **kwargs: Any) -> list[float]:
        release.wait(30)  # an async function that blocks: worse than slow
        return by_rank(completions)

    stub = StubServer()
    async with running(stub, [slow if kind == "sync" else blocking], prompts=20, max_concurrent_rollouts=6) as engine:
        request = asyncio.create_task(only_step(engine))
        deadline = time.monotonic() + 20
        while len(stub.requests) < 60 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        generated = len(stub.requests)
        release.set()
        assert generated == 60, "generation waited for the judge"
        assert (await request).totals.groups == 20


async def test_concurrency_is_bounded() -> None:
    most = 0

    class Watching(AsyncRolloutLoop):
        async def generate_one(self, prompt: Prompt) -> Rollout:
            nonlocal most
            most = max(most, len(self._generating))
            return await super().generate_one(prompt)

    stub = StubServer()
    stub.delay_s = 0.01
    async with running(stub, [by_rank], prompts=10, loop_class=Watching, max_concurrent_rollouts=7) as engine:
        assert (await only_step(engine)).totals.groups == 10
    assert most == 6  # two groups of three


async def test_the_hooks_of_a_subclass() -> None:
    class Mine(AsyncRolloutLoop):
        async def setup(self) -> None:
            self.pass_rates: dict[int, float] = {}

        def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
            assert row["prompt"] == f"p{row_index}"
            return self.pass_rates.get(row_index, 0.0) < self.config["cap"]

        async def generate_one(self, prompt: Prompt) -> Rollout:
            rollout = await super().generate_one(prompt)
            rollout.reward = 10.0 * (prompt.row == 1)
            return rollout

        def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
            self.pass_rates[group.row_index] = float(np.mean(group.rewards > 5))
            return super().compute_advantages(group) * 2

    async with running(
        StubServer(), [by_rank], prompts=2, loop_class=Mine, args={"cap": 0.9}, num_train_epochs=2, max_concurrent_rollouts=1
    ) as engine:
        step = await only_step(engine)
    assert step.totals.groups == 3  # row 1 passes in the first epoch and is left out of the second
    assert step.metrics["rollout/dropped_groups_total/filtered"][0] == 1
    assert {round(float(a), 2) for a in step.rows[0][0].advantages} == {-2.45, 0.0, 2.45}
    assert engine.ledger.state_dict()["dropped"] == {"filtered": 1}


async def test_an_epoch_in_which_every_prompt_is_filtered_raises() -> None:
    class Picky(AsyncRolloutLoop):
        def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
            return False

    async with running(StubServer(), [by_rank], loop_class=Picky, max_steps=3) as engine:
        with pytest.raises(DatasetError, match=r"every prompt of epoch 0 was rejected \(4 filtered"):
            await only_step(engine)


async def test_a_fault_in_a_hook_ends_the_run_with_it() -> None:
    class Broken(AsyncRolloutLoop):
        def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
            raise ZeroDivisionError("in the hook")

    async with running(StubServer(), [by_rank], loop_class=Broken) as engine:
        with pytest.raises(ZeroDivisionError, match="in the hook"):
            await only_step(engine)


@pytest.mark.parametrize("given", [None, 1.0, np.zeros(7), np.zeros((3, 1)), ["a", "b", "c"]])
async def test_advantages_that_are_not_one_per_rollout_are_refused(given: Any) -> None:
    class Wrong(AsyncRolloutLoop):
        def compute_advantages(self, group: RolloutGroup) -> Any:
            return given

    async with running(StubServer(), [by_rank], loop_class=Wrong) as engine:
        with pytest.raises(ConfigError, match=r"Wrong\.compute_advantages returned .* for 3 rollouts: return one number per"):
            await only_step(engine)


@pytest.mark.parametrize("spread", [1.0, 0.0])
async def test_advantages_must_be_finite_where_the_group_is_kept(spread: float) -> None:
    class Wrong(AsyncRolloutLoop):
        def compute_advantages(self, group: RolloutGroup) -> Any:
            return [np.nan] * len(group.rollouts)

    def reward(completions: list[Any]) -> list[float]:
        return [spread * i for i in range(len(completions))]

    async with running(StubServer(), [reward], loop_class=Wrong) as engine:
        if spread:
            with pytest.raises(ConfigError, match=r"compute_advantages returned \[nan, nan, nan\]: give every"):
                await only_step(engine)
        else:  # dropped for equal rewards
            assert await only_step(engine) is None


@pytest.mark.parametrize("hook", ["filter_prompt", "compute_advantages"])
async def test_a_hook_that_must_not_be_async_is_refused(hook: str) -> None:
    async def asynchronous(self: Any, *arguments: Any) -> bool:
        return False

    loop_class = type("Mine", (AsyncRolloutLoop,), {hook: asynchronous})
    async with running(StubServer(), [by_rank], loop_class=loop_class) as engine:
        with pytest.raises(ConfigError, match=rf"Mine\.{hook} is async: write it with `def`"):
            await only_step(engine)


@pytest.mark.parametrize("own", [True, False])
async def test_a_setup_that_does_not_return_is_named(own: bool) -> None:
    class Waiting(AsyncRolloutLoop):
        async def setup(self) -> None:
            if own:
                raise TimeoutError("the index did not answer")
            await asyncio.sleep(3600)

    error, message = (TimeoutError, "the index") if own else (NoProgress, r"Waiting\.setup\(\) did not return within 0 s")
    with pytest.raises(error, match=message):
        async with running(StubServer(), [by_rank], loop_class=Waiting, rollout_worker_timeout=0.2):
            pass


async def test_something_that_is_cancelled_in_generate_one_costs_one_rollout() -> None:
    class Impatient(AsyncRolloutLoop):
        calls = 0

        async def generate_one(self, prompt: Prompt) -> Rollout:
            self.calls += 1
            if self.calls == 1:
                task = asyncio.create_task(asyncio.sleep(3600))
                task.cancel()
                await task
            return await super().generate_one(prompt)

    async with running(StubServer(), [by_rank], prompts=2, loop_class=Impatient) as engine:
        step = await only_step(engine)
    assert step.totals.groups == 2 and step.totals.sequences == 5
    assert step.metrics["rollout/failed_total/generate"][0] == 1


@pytest.mark.parametrize("given", [None, "good"])
async def test_a_reward_of_generate_one_is_a_number_or_none(given: Any) -> None:
    class Mine(AsyncRolloutLoop):
        async def generate_one(self, prompt: Prompt) -> Rollout:
            rollout = await super().generate_one(prompt)
            rollout.reward = given
            return rollout

    async with running(StubServer(), [by_rank], prompts=2, loop_class=Mine) as engine:
        step = await only_step(engine)
    assert engine.ledger.state_dict()["dropped"] == ({} if given is None else {"failed": 2})
    assert (step is None) == (given is not None)


async def test_rewards_that_do_not_fit_the_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="no reward function is given"):
        async with running(StubServer(), []):
            pass
    with pytest.raises(ConfigError, match="reward_weights has 2 values for 1 reward functions"):
        async with running(StubServer(), [by_rank], reward_weights=[1.0, 2.0], reward_funcs=["a:b", "c:d"]):
            pass
