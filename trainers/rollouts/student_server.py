"""One server of a pool: its connections, its cap, and what is known of its state.

A server is usable unless it is down (a connection could not be made or broke, and no look at it has succeeded since), rests (it
answered several requests in a row with errors), holds old weights, or was removed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from trainers.rollouts.client import GenerateClient
from trainers.rollouts.concurrency import AdaptiveCap
from trainers.rollouts.server_load import ServerLoad
from trainers.rollouts.tries import within
from trainers.types import TurnRecord

FAILURES_TO_REST = 3
REST_S = 5.0
LOOKS_TO_GIVE_UP = 3


@dataclass(eq=False, slots=True)
class StudentServer:
    """`rollouts` counts the conversations on it. Times are monotonic seconds."""

    name: str
    client: GenerateClient
    cap: AdaptiveCap
    rollouts: int = 0
    down_since: float | None = None
    old_weights: str | None = None  # what showed that its weights are not those it confirmed
    old_since: float = 0.0
    removed: bool = False
    rests_until: float = 0.0
    doubted: asyncio.Event = field(default_factory=asyncio.Event)  # it is to be looked at now
    _failures: int = 0  # in a row
    _unanswered: int = 0  # looks in a row
    _load: ServerLoad | None = None
    _loaded_at: float = 0.0
    _tok_s: float = 0.0
    _preemptions_told: float | None = None
    _attempts: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def usable(self) -> bool:
        return not self.removed and self.lost_since is None and time.monotonic() >= self.rests_until

    @property
    def lost_since(self) -> float | None:
        """Since when it could not be used however long one waited; None: it can, perhaps after a rest."""
        return self.down_since if self.old_weights is None else self.old_since

    @property
    def fullness(self) -> float:
        """Rollouts in flight as a share of the cap."""
        return self.rollouts / self.cap.value

    @property
    def has_metrics(self) -> bool:
        return self.client.facts is not None and self.client.facts.load is not None

    @property
    def trouble(self) -> str:
        """What is wrong with it, for messages."""
        label = f"{self.name} ({self.client.base_url})"
        if self.old_weights is not None:
            return f"{label} has lost its weights: {self.old_weights}"
        if self.down_since is not None:
            return f"{label} has been unreachable for {time.monotonic() - self.down_since:.0f} s"
        return f"{label} answers with errors"

    # Requests

    async def attempt(self, limit_s: float, prompt_ids: Any, **request: Any) -> TurnRecord:
        """`GenerateClient.attempt`, within `limit_s` seconds. Raises `Retryable` with cause `timeout` after that."""
        async with within(limit_s, f"{self.client.base_url}: ") as scope:
            self._attempts.add(scope)
            try:
                turn = await self.client.attempt(prompt_ids, **request)
            finally:
                self._attempts.discard(scope)
        self.answered()
        return turn

    def abort_attempts(self) -> None:
        """What is in flight ends as a timeout, and is tried elsewhere."""
        for scope in self._attempts:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    # State

    def answered(self) -> None:
        """A request: it does what it should."""
        self.looked_well()
        self._failures, self.rests_until = 0, 0.0

    def looked_well(self) -> None:
        """A look found it up."""
        self.down_since, self._unanswered = None, 0

    def failed(self, cause: str) -> None:
        """A request failed in a way that another server might not."""
        if cause == "connection":
            self._failures, self.rests_until = 0, 0.0  # what comes back is another process
        elif cause != "reset" or self.down_since is None:  # all that was on its way breaks at once
            self._failures += 1
            if self._failures >= FAILURES_TO_REST:
                self.rests_until = time.monotonic() + REST_S
        if cause in ("connection", "reset") and self.down_since is None:
            self.down_since = time.monotonic()
            self.doubted.set()

    def unanswered(self) -> bool:
        """A look at it got no answer. Whether that is so for good."""
        self._unanswered += 1
        return self._unanswered >= LOOKS_TO_GIVE_UP

    # Load

    def note_load(self, load: ServerLoad | None) -> None:
        """A look at it succeeded."""
        now = time.monotonic()
        if load is not None and self._load is not None and now > self._loaded_at:
            # Less than before: it was restarted.
            self._tok_s = max(0.0, load.generated_tokens - self._load.generated_tokens) / (now - self._loaded_at)
        self._load, self._loaded_at, self._unanswered = load, now, 0

    def gauges(self) -> dict[str, float]:
        """Catalog metrics; only the cap where it has no `/metrics`. Preemptions are those since the last call."""
        prefix = f"server/{self.name}/"
        values = {prefix + "concurrency_cap": self.cap.value}
        if self._load is not None:
            values |= {
                prefix + "kv_cache_usage": self._load.kv_cache_usage,
                prefix + "running": self._load.running,
                prefix + "waiting": self._load.waiting,
                prefix + "preemptions_total": self._new_preemptions(self._load.preemptions),
                prefix + "generated_tok_s": self._tok_s,
            }
        return values

    def _new_preemptions(self, count: float) -> float:
        """The server counts since its own start, which may be before or within this run."""
        before, self._preemptions_told = self._preemptions_told, count
        return 0.0 if before is None else count - before if count >= before else count
