"""Deterministic stand-ins for the rollout process's tests: a `RolloutSource` whose groups finish when the test says so, and a
character tokenizer with a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainers.algorithms.grpo import GRPO
from trainers.config import GRPOConfig
from trainers.data import PromptBuilder, Rows
from trainers.metrics import MetricBag
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.reconcile import reconcile
from trainers.rollouts.source import Dropped
from trainers.streams import Stream
from trainers.types import Prompt, Rollout, RolloutGroup, TurnRecord, VersionSpan


class CharTokenizer:
    """One id per character; 1 is EOS (`$`), 2 and 3 begin a user and an assistant turn (`<`, `>`)."""

    chat_template = "fake"
    eos_token_id = 1
    all_special_ids = (1, 2, 3)
    _SPECIAL = {"$": 1, "<": 2, ">": 3}  # noqa: RUF012

    def __len__(self) -> int:
        return 300

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self._SPECIAL.get(char, ord(char) + 4) for char in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        names = {value: key for key, value in self._SPECIAL.items()}
        return "".join(("" if skip_special_tokens else names[i]) if i in names else chr(i - 4) for i in ids)

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool) -> str:
        marks = {"user": "<", "assistant": ">", "system": "<"}
        text = "".join(marks[m["role"]] + m["content"] + ("$\n" if m["role"] == "assistant" else "") for m in messages)
        return text + ">" * add_generation_prompt


class FakeSource:
    """Holds every prompt until `finish`. The sampled id of a rollout is its name, unique over all sources that share `names`.

    Args:
        names: name → (epoch, row, number of this generation of the prompt).
        delay_s: None: the test calls `finish`; else groups finish by themselves after this time, with alternating rewards.
    """

    def __init__(
        self,
        delay_s: float | None = None,
        generations: int = 2,
        max_sequence_tokens: int = 64,
        names: dict[int, tuple[int, int, int]] | None = None,
    ) -> None:
        self.max_sequence_tokens = max_sequence_tokens
        self.pending: list[tuple[Prompt, int]] = []  # with the policy version at dispatch
        self.names = {} if names is None else names
        self.version = 0
        self._delay_s, self._generations = delay_s, generations
        self._ready: asyncio.Queue[RolloutGroup | Dropped | None] = asyncio.Queue()
        self._ended = False

    async def open(self) -> None: ...

    def synced(self, version: int, served_as: str | None = None) -> None:
        self.version = version

    def servers(self, servers: Sequence[tuple[str, str]]) -> None: ...

    async def groups(self, prompts: AsyncIterator[Prompt]) -> AsyncIterator[RolloutGroup | Dropped]:
        feeder = asyncio.create_task(self._feed(prompts))
        try:
            while (item := await self._ready.get()) is not None:
                yield item
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)

    async def _feed(self, prompts: AsyncIterator[Prompt]) -> None:
        async for prompt in prompts:
            self.pending.append((prompt, self.version))
            if self._delay_s is not None:
                asyncio.get_running_loop().call_later(self._delay_s, self.finish_prompt, prompt)
        self._ended = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._ended and not self.pending:
            self._ready.put_nowait(None)

    def finish_prompt(self, prompt: Prompt) -> None:
        self.finish([entry[0] is prompt for entry in self.pending].index(True))

    def finish(self, position: int, rewards: Sequence[float] | None = None, lengths: Sequence[int] | None = None) -> None:
        """Finish the group at `position` of `pending`; no rewards at all: every rollout of it failed."""
        prompt, version = self.pending.pop(position)
        rewards = [float(i % 2) for i in range(self._generations)] if rewards is None else rewards
        if not rewards:
            self._ready.put_nowait(Dropped(prompt, "failed"))
            self._end_if_done()
            return
        lengths = [3] * len(rewards) if lengths is None else lengths
        rollouts, generation = [], len(self.names)
        for reward, length in zip(rewards, lengths, strict=True):
            name = 1000 + len(self.names)
            self.names[name] = (prompt.epoch, prompt.row, generation)
            ids = np.full(length, name, np.int32)
            turn = TurnRecord(
                prompt.token_ids, ids, np.full(length, -0.5, np.float32), [VersionSpan(0, length, version)], "stop"
            )
            said = [{"role": "assistant", "content": "x"}]
            rollouts.append(Rollout(prompt, [turn], said, reward=reward, reconciled=reconcile([turn], 1024)))
        group = RolloutGroup(prompt, rollouts)
        values = group.rewards
        group.advantages = (values - values.mean()).astype(np.float32)
        self._ready.put_nowait(group)
        self._end_if_done()

    def describe(self) -> str:
        return f"the fake engine holds {len(self.pending)} groups"

    def gauges(self) -> dict[str, float]:
        return {"rollout/concurrency": len(self.pending)}

    async def close(self) -> None: ...


def fake_config(**changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {"model": "none", "dataset": {"path": "none"}, "num_generations": 2, "token_budget": 0}
    return GRPOConfig(**(values | {"per_device_train_batch_size": 4} | changes))


def fake_rows(count: int) -> Rows:
    return Rows([{"prompt": f"p{i}", "answer": str(i)} for i in range(count)], "fake rows")


def fake_engine(
    config: GRPOConfig,
    source: Any,
    rows: Rows | Stream,
    *,
    resume: Path | None = None,
    version: int = 0,
    step: int = 0,
    world_size: int = 1,
) -> StepEngine:
    """An engine over `source`, restored from `resume` and started. Call it inside a running event loop."""
    budget = config.token_budget
    engine = StepEngine(
        config,
        GRPO(config),
        source,
        rows,
        PromptBuilder(CharTokenizer(), config),
        token_budget=budget if budget is None or budget > 0 else None,
        max_sequence_tokens=source.max_sequence_tokens,
        version=version,
        resume_step=step,
        world_size=world_size,
        metrics=MetricBag(),
        rng=np.random.default_rng(0),
    )
    if resume is not None:
        engine.restore(resume)
    engine.start()
    return engine


async def settle(rounds: int = 20) -> None:
    """Let everything that can run without waiting for the test run."""
    for _ in range(rounds):
        await asyncio.sleep(0)
