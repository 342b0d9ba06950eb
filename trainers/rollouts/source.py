"""The `RolloutSource` seam: prompts in, finished groups out; and the source that plays back a dataset.

    prompts (the engine admits one whenever there is room) ─▶ RolloutSource.groups ─▶ RolloutGroup with rewards and advantages
                                                                                  └─▶ Dropped(prompt, cause)

Every prompt taken gives exactly one of the two, in any order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainers.algorithms import Algorithm
from trainers.recorded import RecordedRows
from trainers.rollouts.reconcile import Reconciled, TokenSequence
from trainers.types import Prompt, Rollout, RolloutGroup, TurnRecord, VersionSpan


@dataclass(frozen=True, slots=True)
class Dropped:
    """A prompt without a group. Causes: `filtered`, `too_long`, `failed`, `stale`."""

    prompt: Prompt
    cause: str


class RolloutSource(Protocol):
    """Where groups come from."""

    max_sequence_tokens: int  # longest sequence it can produce; known after `open`

    async def open(self) -> None:
        """Connect to what is needed. Raises `ServerError` or `ConfigError`."""
        ...

    def synced(self, version: int, served_as: str | None = None) -> None:
        """The servers hold policy `version` from now on; `served_as`: see `StepSource.synced`."""
        ...

    def servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """The servers that hold the newest policy, as (name, URL): some may be new, some gone."""
        ...

    def groups(self, prompts: AsyncIterator[Prompt]) -> AsyncIterator[RolloutGroup | Dropped]: ...

    def describe(self) -> str:
        """What it is doing, for the message of a run that makes no progress."""
        ...

    def gauges(self) -> dict[str, float]:
        """Metrics with reduction `last`, as they are now."""
        ...

    async def close(self) -> None: ...


class RecordedSource:
    """A dataset row is a finished rollout (SFT) of one turn, with logprob 0 and version 0."""

    def __init__(self, rows: RecordedRows, algorithm: Algorithm, max_sequence_tokens: int) -> None:
        self.max_sequence_tokens = max_sequence_tokens
        self._rows, self._algorithm = rows, algorithm

    async def open(self) -> None:
        """Nothing to connect to."""

    def synced(self, version: int, served_as: str | None = None) -> None:
        """Recorded rows have no version."""

    def servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """Recorded rows come from no server."""

    async def groups(self, prompts: AsyncIterator[Prompt]) -> AsyncIterator[RolloutGroup | Dropped]:
        async for prompt in prompts:
            group = self._group(prompt)
            group.advantages = np.asarray(self._algorithm.advantages(group), dtype=np.float32)
            yield group
            await asyncio.sleep(0)  # messages from the trainer get their turn

    def _group(self, prompt: Prompt) -> RolloutGroup:
        row = self._rows.recorded(prompt)
        trained = np.flatnonzero(row.loss_mask)
        # What comes before the first trained token is the turn's prompt.
        first = int(trained[0]) if len(trained) else len(row.token_ids)
        output = row.token_ids[first:]
        turn = TurnRecord(
            row.token_ids[:first], output, np.zeros(len(output), np.float32), [VersionSpan(0, len(output), 0)], "stop"
        )
        sequence = TokenSequence(row.token_ids, np.where(row.loss_mask, np.arange(len(row.token_ids)) - first, -1))
        reconciled = Reconciled([sequence] if len(trained) else [], [])
        return RolloutGroup(prompt, [Rollout(prompt, [turn], row.messages, reconciled=reconciled)])

    def describe(self) -> str:
        return "reading recorded rows"

    def gauges(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Nothing was opened."""
