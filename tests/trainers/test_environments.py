"""Environments through the whole rollout side, against a server that answers by script; and the objects' lives."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.support.rollout_runs import by_rank, only_step, running
from tests.support.stub_server import StubServer
from tests.support.tool_chat import call, responses, text, tool_tokenizer
from trainers.errors import ConfigError
from trainers.rollouts.environments import with_observation
from trainers.rollouts.protocol import RequestFailed
from trainers.types import Prompt

TOOLS: dict[str, Any] = {"tokenizer": tool_tokenizer(), "max_completion_length": 1000, "token_budget": -1, "num_generations": 2}
GROUP_OF_THREE: dict[str, Any] = TOOLS | {"num_generations": 3}


class Counter:
    """Counts up to the row's answer. Every object notes what happens to it."""

    made: list[Counter] = []  # noqa: RUF012

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.log: list[str] = []
        self.row: dict[str, Any] = {}
        Counter.made.append(self)

    def reset(self, **row: Any) -> str | None:
        self.row = row
        self.log.append("reset")
        return f" (from {self.count})"

    def step(self, by: int) -> str:
        """Count on.

        Args:
            by: how far
        """
        self.count += by
        self.log.append("step")
        return f"at {self.count}"

    def get_reward(self) -> float | None:
        self.log.append("reward")
        return float(self.count + Counter.made.index(self))

    def close(self) -> None:
        self.log.append("close")

    def _private(self) -> None:
        """Not a tool."""


class AsyncCounter(Counter):
    async def reset(self, answer: str) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.row = {"answer": answer}
        self.log.append("reset")

    async def step(self, by: int) -> str:  # type: ignore[override]
        """Count on.

        Args:
            by: how far
        """
        await asyncio.sleep(0)
        return Counter.step(self, by)

    async def get_reward(self) -> float | None:  # type: ignore[override]
        return Counter.get_reward(self)

    async def close(self) -> None:  # type: ignore[override]
        Counter.close(self)


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Counter.made.clear()


def stepping(turns: int = 2) -> StubServer:
    """A model that steps so many times and then says so."""
    stub = StubServer(max_model_len=4000)
    stub.script = lambda prompt: call("step", by=2) if len(responses(prompt)) < turns else "done"
    return stub


@pytest.mark.parametrize("kind", [Counter, AsyncCounter])
async def test_a_rollout_has_an_environment_of_its_own_that_shows_acts_and_rewards(kind: type[Counter]) -> None:
    stub = stepping()
    async with running(stub, [], 1, environment_factory=kind, **TOOLS) as engine:
        step = await only_step(engine)
    looked_at, *used = Counter.made
    assert looked_at.log == ["close"]
    assert [environment.log for environment in used] == [["reset", "step", "step", "reward", "close"]] * 2
    assert all(environment.count == 4 and environment.row["answer"] == "0" for environment in used)
    first = text(stub.requests[0]["token_ids"])
    if kind is Counter:
        assert used[0].row["prompt"] == "p0"
        assert "<|im_start|>user\np0 (from 0)<|im_end|>" in first
    assert '"name": "step"' in first
    assert not any(f'"name": "{name}"' in first for name in ("reset", "get_reward", "close", "_private"))
    assert responses(stub.requests[-1]["token_ids"]) == ["at 2", "at 4"]
    metrics = step.metrics
    assert metrics[f"rewards/{kind.__name__}"] == metrics["reward"] and metrics["reward"][1] == 2
    assert metrics["env/reset_s"][1] == 2 and metrics["env/step_s"][1] == 4 and metrics["env/reward_s"][1] == 2
    assert metrics["tools/step/call_total"][0] == 4


async def test_the_environments_reward_is_added_to_the_functions() -> None:
    def weighted(completions: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
        assert all(prompt[-1]["content"] == "p0 (from 0)" for prompt in prompts)
        return [10.0 * i for i in range(len(completions))]

    async with running(
        stepping(), [weighted], 1, environment_factory=Counter, reward_weights=[0.5], reward_funcs=["a:b"], **TOOLS
    ) as engine:
        step = await only_step(engine)
    own = step.metrics["rewards/Counter"][0]
    assert step.metrics["reward"] == (own + 0.5 * 10.0, 2.0)


async def test_none_of_get_reward_is_not_applicable() -> None:
    class Undecided(Counter):
        def get_reward(self) -> None:
            return None

    async with running(stepping(), [by_rank], 1, environment_factory=Undecided, **TOOLS) as engine:
        step = await only_step(engine)
    assert step.metrics["rewards/Undecided_none_frac"] == (2.0, 2.0) and "rewards/Undecided" not in step.metrics
    assert step.metrics["reward"] == (1.0, 2.0)


@pytest.mark.parametrize(("method", "cause"), [("reset", "environment"), ("get_reward", "environment"), ("nan", "reward")])
async def test_an_environment_that_fails_costs_its_rollout_and_is_closed(method: str, cause: str) -> None:
    class Failing(Counter):
        def _fails(self) -> bool:
            return self is next(env for env in Counter.made if "begun" in env.log)

        def reset(self, **row: Any) -> None:
            self.log.append("begun")
            if method == "reset" and self._fails():
                raise OSError("no")

        def get_reward(self) -> float:
            if method == "get_reward" and self._fails():
                raise OSError("no")
            return float("nan") if method == "nan" and self._fails() else float(len(self.log) + Counter.made.index(self))

    async with running(stepping(), [], 1, environment_factory=Failing, **GROUP_OF_THREE) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 2 and step.metrics[f"rollout/failed_total/{cause}"][0] == 1
    assert all(environment.log[-1] == "close" for environment in Counter.made)


async def test_a_method_that_raises_is_told_to_the_model() -> None:
    class Slippery(Counter):
        def step(self, by: int) -> str:
            """Count on.

            Args:
                by: how far
            """
            raise ValueError("slipped")

    stub = stepping(1)
    async with running(stub, [by_rank], 1, environment_factory=Slippery, **TOOLS) as engine:
        step = await only_step(engine)
    assert "ValueError: slipped" in responses(stub.requests[-1]["token_ids"])[0]
    assert step.metrics["tools/step/failure_total"][0] == 2 and step.totals.sequences == 2


async def test_environments_of_a_run_that_ends_are_closed() -> None:
    stub = stepping()
    stub.delay_s = 3600
    async with running(stub, [by_rank], 2, environment_factory=Counter, **TOOLS):
        for _ in range(1000):
            if len(stub.requests) == 4:
                break
            await asyncio.sleep(0.01)
    assert [environment.log for environment in Counter.made[1:]] == [["reset", "close"]] * 4


async def test_an_environment_made_while_the_run_ends_is_closed() -> None:
    making, go_on = threading.Semaphore(0), threading.Event()

    class Slow(Counter):
        def __init__(self) -> None:
            if Counter.made:
                making.release()
                go_on.wait(30)
            super().__init__()

    async with running(stepping(), [by_rank], 1, environment_factory=Slow, **TOOLS) as engine:
        await asyncio.to_thread(making.acquire)
        await asyncio.to_thread(making.acquire)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        go_on.set()
        await closing
    assert all(environment.log == ["close"] for environment in Counter.made)


async def test_one_named_in_the_config_gets_its_arguments() -> None:
    spec = {"path": "tests.trainers.test_environments:Counter", "kwargs": {"start": 7}}
    stub = stepping(0)
    from tests.trainers.test_environments import Counter as Imported

    before = len(Imported.made)
    config = {"tools": ["tests.trainers.test_conversation:add"]}
    async with running(stub, [by_rank], 1, from_config={"environment_factory": spec} | config, **TOOLS) as engine:
        assert (await only_step(engine)).totals.sequences == 2
    shown = text(stub.requests[-1]["token_ids"])
    assert "p0 (from 7)" in shown and '"name": "add"' in shown and '"name": "step"' in shown
    assert len(Imported.made) == before + 3


async def test_a_dataset_without_prompts_leaves_them_to_the_environment() -> None:
    spec = {"path": "tests.trainers.test_environments:Counter"}
    stub = stepping(0)
    async with running(stub, [by_rank], [{"answer": "4"}], from_config={"environment_factory": spec}, **TOOLS) as engine:
        assert (await only_step(engine)).totals.sequences == 2
    assert "<|im_start|>user\n (from 0)<|im_end|>" in text(stub.requests[0]["token_ids"])


async def test_what_is_no_environment_is_refused() -> None:
    class Shapeless:
        def step(self) -> None:
            """Nothing."""

    def broken() -> None:
        raise OSError("no license")

    class Counted(Counter):
        def step(self, by) -> str:  # type: ignore[no-untyped-def]
            return ""

    for factory, message in [
        (Shapeless, "environment Shapeless has no method `reset`"),
        (broken, r"environment_factory\(\) failed: OSError: no license"),
        (Counted, "the model cannot be told how to call tool `step`"),
    ]:
        with pytest.raises(ConfigError, match=message):
            async with running(StubServer(), [by_rank], environment_factory=factory, **TOOLS):
                pass
    assert all(environment.log == ["close"] for environment in Counter.made)


async def test_a_run_without_any_reward_is_refused() -> None:
    class Silent:
        def reset(self, **row: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"no reward function is given: .* or give the environment a `get_reward`"):
        async with running(StubServer(), [], environment_factory=Silent, **TOOLS):
            pass


def test_an_observation_is_appended_to_the_last_message() -> None:
    plain = Prompt(0, 0, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], {}, None)  # type: ignore[arg-type]
    assert with_observation(plain, None) is plain.messages
    assert with_observation(plain, "!") == [{"role": "system", "content": "s"}, {"role": "user", "content": "u!"}]
    assert with_observation(plain, 7)[-1]["content"] == "u7"
    image = {"type": "image"}
    assert with_observation(plain, [image])[-1]["content"] == [{"type": "text", "text": "u"}, image]
    parts = Prompt(0, 0, [{"role": "user", "content": [image]}], {}, None)  # type: ignore[arg-type]
    assert with_observation(parts, "!")[-1]["content"] == [image, {"type": "text", "text": "!"}]
    for wrong in ([{"role": "user", "content": "?"}], ["text"]):
        with pytest.raises(RequestFailed, match=r"reset returned \[.*\]: return text, or a list of content parts"):
            with_observation(plain, wrong)
    assert plain.messages[-1] == {"role": "user", "content": "u"} and parts.messages[-1]["content"] == [image]
