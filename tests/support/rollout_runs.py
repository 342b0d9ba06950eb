"""Runs of the real rollout side against the stub server, as short as a test needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.fake_engine import CharTokenizer, fake_config
from tests.support.stub_server import StubServer
from trainers.errors import DatasetError
from trainers.rollouts.build import build_engine
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.payload import Payload

Reward = Callable[..., Any]


def by_rank(completions: list[Any], **kwargs: Any) -> list[float]:
    """Rewards that differ within every group."""
    return [float(i) for i in range(len(completions))]


@asynccontextmanager
async def running(
    stub: StubServer,
    rewards: list[Reward],
    prompts: int | list[dict[str, Any]] = 4,
    loop_class: type | None = None,
    args: Any = None,
    tokenizer: Any = None,
    tools: list[Any] | None = None,
    environment_factory: Any = None,
    from_config: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[StepEngine]:
    """An engine over the real loop, synced at version 0. Its step has room for everything, so that it ends with the data."""
    async with stub.run():
        values: dict[str, Any] = {"per_device_train_batch_size": 1000, "max_rollout_failure_frac": 1.0, "num_generations": 3}
        values |= {"max_completion_length": 8, "keep_rollout_every": 1}
        config = fake_config(vllm_server_base_url=stub.url, **(values | changes | (from_config or {})))
        payload = Payload(
            reward_funcs=rewards,
            dataset=[{"prompt": f"p{i}", "answer": str(i)} for i in range(prompts)] if isinstance(prompts, int) else prompts,
            tokenizer=tokenizer or CharTokenizer(),
            loop_class=loop_class,
            args=args,
            tools=tools,
            environment_factory=environment_factory,
        )
        engine, _ = await build_engine(
            config, payload, version=0, resume_step=0, resume_dir=None, world_size=1, say=lambda doing: None
        )
        async with started(engine):
            yield engine


@asynccontextmanager
async def started(engine: StepEngine) -> AsyncIterator[None]:
    """The engine generates at version 0 meanwhile."""
    engine.start()
    engine.synced(0)
    try:
        yield
    finally:
        await engine.close()


async def only_step(engine: StepEngine) -> Any:
    """The step that holds everything; None if nothing was left to train on, which is how a run fails that trained nothing."""
    try:
        return await asyncio.wait_for(engine.step(1, 0), 60)
    except DatasetError as error:
        if not str(error).startswith("nothing was trained: all "):
            raise
        return None
