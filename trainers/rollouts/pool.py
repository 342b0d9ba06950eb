"""The student servers as one: where a conversation goes, what is tried again and where, and when it is over.

    lease ─▶ least loaded usable server ─▶ turn ─▶ attempt ──────────────▶ TurnRecord
                     ▲                               │ Retryable, old weights
                     └──── the lease moves ◀─────────┘ to another usable server, else the same after a pause

Which servers there are, and which can be used: `students`.

Invariants:
- a conversation's turns stay on its server (prefix cache) as long as that server is usable;
- a request has one time budget for all its tries and pauses; nothing below the pool retries; time without any server is not
  counted, for a replacement may take longer to start than a request may take;
- no usable server for `unreachable_s`: `ServerError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainers.errors import ServerCapabilityError, ServerError
from trainers.rollouts.protocol import PLAIN, Retryable, SamplingForm
from trainers.rollouts.student_server import StudentServer
from trainers.rollouts.students import LOOK_AGAIN_S, Students
from trainers.rollouts.tries import Tries
from trainers.types import TurnRecord

UNREACHABLE_S = 30.0
LOOK_EVERY_S = 3.0
LATECOMERS_S = 10.0  # after the first server answered, the others are waited for so long


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What the engine must know of its servers."""

    max_model_len: int  # the least of all servers'


@dataclass(eq=False, slots=True)
class Lease:
    """One conversation in flight, and the server it is on."""

    server: StudentServer


class ServerPool:
    """Students that serve the same policy.

    Args:
        urls: of the servers, without `/v1`.
        budget_s: seconds a request may take, all its tries and pauses together; one try takes at most half of it.
        ceiling: most rollouts in flight on all servers together.
        on_retry: called once for every request that is sent again, with the cause.
        on_outage: called again and again while a request waits because no server is there.
        form: what every request asks for beside its own temperature, length and seed.
        unreachable_s: seconds without a server that is up with the right weights, after which the run's servers count as gone.
        latecomers_s: seconds that `open` waits for other servers once one has answered.
    """

    def __init__(
        self,
        urls: Sequence[str],
        budget_s: float,
        ceiling: int,
        *,
        on_retry: Callable[[str], None] = lambda cause: None,
        on_outage: Callable[[], None] = lambda: None,
        form: SamplingForm = PLAIN,
        first_pause_s: float = 0.5,
        unreachable_s: float = UNREACHABLE_S,
        look_every_s: float = LOOK_EVERY_S,
        latecomers_s: float = LATECOMERS_S,
    ) -> None:
        self.students = Students(
            urls, ceiling, form, unreachable_s=unreachable_s, look_every_s=look_every_s, latecomers_s=latecomers_s
        )
        self.changed = self.students.changed  # set when a rollout ended or the cap moved; whoever waits clears it
        self._budget_s, self._first_pause_s, self._unreachable_s = budget_s, first_pause_s, unreachable_s
        self._on_retry, self._on_outage = on_retry, on_outage
        self._last_error: str | None = None
        self._jitter = random.Random(0)

    async def open(self, wait_s: float) -> PoolFacts:
        """As `Students.open`."""
        return PoolFacts(await self.students.open(wait_s))

    async def close(self) -> None:
        await self.students.close()

    def members(self, servers: Sequence[tuple[str, str]]) -> None:
        """As `Students.listed`."""
        self.students.listed(servers)

    # Room

    @property
    def cap(self) -> float:
        """Most rollouts in flight now."""
        return self.students.cap

    @property
    def in_flight(self) -> int:
        """Rollouts that hold a lease."""
        return sum(server.rollouts for server in self.students.all)

    def room(self, rollouts: int) -> bool:
        """Whether so many more may start. With nothing in flight any number may: one group always runs."""
        return not self.in_flight or self.in_flight + rollouts <= self.cap

    def lease(self) -> Lease:
        """A place for one conversation, on the least loaded server. Give it back with `release`."""
        server = self.students.least_loaded()
        server.rollouts += 1
        return Lease(server)

    def release(self, lease: Lease, finished: bool = True) -> None:
        """The conversation ended. `finished` false: it failed, which says nothing of what the server can take."""
        server = lease.server
        server.rollouts -= 1
        if finished:
            server.cap.finished(server.rollouts)
        self.changed.set()

    # Requests

    async def turn(
        self,
        prompt_ids: np.ndarray,
        *,
        lease: Lease,
        temperature: float,
        max_tokens: int,
        seed: int,
        version: Callable[[], int | None],
        adapter: str | None = None,
    ) -> TurnRecord:
        """Generate one turn. `version` gives the policy version the servers hold now; it is asked at every try.
        None: whatever weights they hold, under version 0 (evaluation). `adapter`: which one this version is, where it is one.

        Raises:
            RequestFailed: refused, or out of budget.
            ServerError: no server is left.
        """
        tries = Tries(self._budget_s, self._first_pause_s, self._jitter)
        failed: set[StudentServer] = set()  # since the last pause
        while True:
            if not lease.server.usable:
                tries.forgive(await self._find_another(lease))
            server, wanted = lease.server, version()
            self.students.asked_for(wanted, adapter)
            try:
                turn = await server.attempt(
                    tries.begin(),
                    prompt_ids,
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=seed,
                    version=wanted,
                    adapter=adapter,
                )
                self._last_error = None
                return turn
            except Retryable as error:
                self._last_error, cause = str(error), error.cause
                server.failed(cause)
            except ServerCapabilityError:
                raise  # every request would be refused
            except ServerError as error:
                self._last_error, cause = str(error), "old_weights"
                self.students.set_aside(server, str(error))
            self._require_a_server()
            failed.add(server)
            others = [other for other in self.students.usable() if other not in failed]
            pause_s = 0.0 if others else tries.pause()
            tries.check(pause_s, cause, self._last_error)
            self._on_retry(cause)
            if others:
                self._move(lease, min(others, key=lambda other: other.fullness))
            else:
                await asyncio.sleep(pause_s)
                failed.clear()

    async def _find_another(self, lease: Lease) -> float:
        """Move to the best server that is up with the right weights; seconds that none was. They are looked at, not tried."""
        began = time.monotonic()
        while True:
            self._require_a_server()
            self._move(lease, self.students.least_loaded())
            if lease.server.lost_since is None:
                return time.monotonic() - began
            self._on_outage()
            self.students.back.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self.students.back.wait()

    def _move(self, lease: Lease, server: StudentServer) -> None:
        lease.server.rollouts -= 1
        lease.server = server
        server.rollouts += 1

    def _require_a_server(self) -> None:
        """Raises `ServerError` when there is none left to wait for."""
        lost = [server.lost_since for server in self.students.all]
        newest = max((moment for moment in lost if moment is not None), default=0.0)
        if None not in lost and time.monotonic() - newest > self._unreachable_s:
            troubles = "; ".join(server.trouble for server in self.students.all)
            raise ServerError(f"{troubles} (last error: {self._last_error})")

    # For messages and metrics

    @property
    def trouble(self) -> str:
        """The newest error, if no request has succeeded since; for messages."""
        return f" (last error: {self._last_error})" if self._last_error else ""

    def describe(self) -> str:
        """The servers by name, with what is wrong with them."""
        return ", ".join(server.client.base_url if server.usable else server.trouble for server in self.students.all)

    def gauges(self) -> dict[str, float]:
        values = {"rollout/concurrency": float(self.in_flight), "rollout/concurrency_cap": self.cap}
        for server in self.students.all:
            values |= server.gauges()
        return values
