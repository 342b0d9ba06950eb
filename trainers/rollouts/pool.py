"""The student servers as one: where a conversation goes, what is tried again and where, and when it is over.

    lease ─▶ least loaded usable server ─▶ turn ─▶ attempt ──────────────▶ TurnRecord
                     ▲                               │ Retryable, old weights
                     └──── the lease moves ◀─────────┘ to another usable server, else the same after a pause

    every few seconds, each server: /metrics ─▶ its cap;  a server that failed: /health and its weights ─▶ usable again
    trainer: `members` ─▶ new ones connected, those no longer listed left at once
    `open`: whoever answers first is enough; the others join when they answer

Invariants:
- a conversation's turns stay on its server (prefix cache) as long as that server is usable;
- a request has one time budget for all its tries and pauses; nothing below the pool retries; time without any server is not
  counted, for a replacement may take longer to start than a request may take;
- a server whose weights are older than those it confirmed gets no request until it holds newer ones;
- no usable server for `unreachable_s`: `ServerError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainers.errors import ServerCapabilityError, ServerError
from trainers.rollouts.client import GenerateClient, ServerFacts
from trainers.rollouts.concurrency import AdaptiveCap
from trainers.rollouts.http import ConnectFailed
from trainers.rollouts.protocol import PLAIN, RequestFailed, Retryable, SamplingForm
from trainers.rollouts.student_server import StudentServer
from trainers.types import TurnRecord

logger = logging.getLogger(__name__)
UNREACHABLE_S = 30.0
LOOK_EVERY_S = 3.0
LOOK_AGAIN_S = 0.5  # at a server that is not usable
LONGEST_PAUSE_S = 10.0
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
        budget_s: seconds a request may take, all its tries and pauses together. One try takes at most half of it, so that
            an answer that was lost leaves time for another.
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
        self.changed = asyncio.Event()  # set when a rollout ended or the cap moved; whoever waits clears it
        self._servers = [
            StudentServer(f"student-{index}", GenerateClient(url, form), AdaptiveCap(ceiling, None, 1))
            for index, url in enumerate(urls)
        ]
        self._budget_s, self._ceiling, self._form = budget_s, ceiling, form
        self._on_retry, self._on_outage = on_retry, on_outage
        self._first_pause_s, self._unreachable_s, self._look_every_s = first_pause_s, unreachable_s, look_every_s
        self._latecomers_s = latecomers_s
        self._held: int | None = None  # the version asked for by the newest request, of adapters the newest asked for
        self._adapter: str | None = None  # which it is, where it is one
        self._last_error: str | None = None
        self._jitter = random.Random(0)
        self._shortest = 1  # max_model_len that every server must have
        self._back = asyncio.Event()  # set when a server is usable again, or new
        self._looks: dict[StudentServer, asyncio.Task[None]] = {}
        self._wanted = {server.client.base_url: server.name for server in self._servers}  # URL → name, as last told
        self._joining: dict[str, asyncio.Task[None]] = {}  # by URL
        self._leaving: set[asyncio.Task[None]] = set()

    async def open(self, wait_s: float) -> PoolFacts:
        """Connect to the servers, waiting up to `wait_s` for the first to answer, and begin to look at them.

        Those that do not answer soon after the first one join when they do.

        Raises:
            ServerError: none answers, or one refuses the key.
        """
        opening = {asyncio.create_task(server.client.open(wait_s)): server for server in self._servers}
        try:
            facts = await self._first_answers(opening)
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
        for late in [server for server in self._servers if server not in facts]:
            url = late.client.base_url
            logger.warning("%s (%s) does not answer yet: the run begins without it", late.name, url)
            self._servers.remove(late)
            await late.client.close()
            self._joining[url] = asyncio.create_task(self._join(late.name, url))
        lengths = [fact.max_model_len for fact in facts.values()]
        self._shortest = min(lengths)
        if len(set(lengths)) > 1:
            logger.warning("the servers' max_model_len differ, the least is used: %s", lengths)
        for server, fact in facts.items():
            self._begin(server, fact)
        return PoolFacts(self._shortest)

    async def _first_answers(self, opening: dict[asyncio.Task[ServerFacts], StudentServer]) -> dict[StudentServer, ServerFacts]:
        """Of whoever answers before, and soon after, the first one."""
        pending, limit_s = set(opening), None
        while pending:
            done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                task.result()
            limit_s = self._latecomers_s
        return {server: task.result() for task, server in opening.items() if task not in pending}

    def _begin(self, server: StudentServer, facts: ServerFacts) -> None:
        server.cap = AdaptiveCap(self._ceiling, facts.load.kv_tokens if facts.load else None, self._shortest)
        server.note_load(facts.load)
        self._looks[server] = asyncio.create_task(self._look_at(server))

    async def close(self) -> None:
        tasks = [*self._looks.values(), *self._joining.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self._servers))

    # Members

    def members(self, servers: Sequence[tuple[str, str]]) -> None:
        """The servers from now on, as (name, URL); at least one. A new one holds the current weights and gets requests once it
        is connected. The requests of one that is no longer listed go elsewhere at once."""
        self._wanted = {url: name for name, url in servers}
        for url in self._joining.keys() - self._wanted.keys():
            self._joining.pop(url).cancel()
        known = {server.client.base_url for server in self._servers} | self._joining.keys()
        for url, name in self._wanted.items():
            if url not in known:
                self._joining[url] = asyncio.create_task(self._join(name, url))
        self._drop_unlisted()

    def _drop_unlisted(self) -> None:
        """Unless none would be left: then when the first new one is connected."""
        if any(server.client.base_url in self._wanted for server in self._servers):
            for server in [server for server in self._servers if server.client.base_url not in self._wanted]:
                self._leave(server)

    def _leave(self, server: StudentServer) -> None:
        logger.info("%s (%s) is no longer one of the servers", server.name, server.client.base_url)
        self._servers.remove(server)
        server.removed = True
        self._looks.pop(server).cancel()
        server.abort_attempts()
        closing = asyncio.create_task(server.client.close())
        self._leaving.add(closing)
        closing.add_done_callback(self._leaving.discard)
        self._changed_members()

    async def _join(self, name: str, url: str) -> None:
        client = GenerateClient(url, self._form)
        try:
            while True:
                try:
                    facts = await client.open(self._unreachable_s)
                    break
                except ServerError as error:
                    logger.warning("%s does not join yet: %s", name, error)
                    await client.close()
        except BaseException:
            await client.close()
            raise
        self._joining.pop(url, None)
        server = StudentServer(name, client, AdaptiveCap(self._ceiling, None, 1))
        self._servers.append(server)
        self._begin(server, facts)
        logger.info("%s (%s) is one of the servers now", name, url)
        self._drop_unlisted()
        self._changed_members()

    def _changed_members(self) -> None:
        self._back.set()
        self.changed.set()

    # Room

    @property
    def cap(self) -> float:
        """Most rollouts in flight now."""
        caps = [server.cap.value for server in self._usable() or self._servers]
        return max(1.0, min(self._ceiling, sum(caps)))

    @property
    def in_flight(self) -> int:
        """Rollouts that hold a lease."""
        return sum(server.rollouts for server in self._servers)

    def room(self, rollouts: int) -> bool:
        """Whether so many more may start. With nothing in flight any number may: one group always runs."""
        return not self.in_flight or self.in_flight + rollouts <= self.cap

    def lease(self) -> Lease:
        """A place for one conversation, on the least loaded server. Give it back with `release`."""
        server = self._least_loaded()
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
        deadline = time.monotonic() + self._budget_s
        pause_s, tries = self._first_pause_s, 0
        failed: set[StudentServer] = set()  # since the last pause
        while True:
            if not lease.server.usable:
                deadline += await self._find_another(lease)
            server, wanted = lease.server, version()
            if adapter is None or self._held is None or wanted is None or wanted >= self._held:
                self._held, self._adapter = wanted, adapter
            limit_s = min(deadline - time.monotonic(), self._budget_s / 2)
            try:
                turn = await server.attempt(
                    limit_s,
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
                self._set_aside(server, str(error))
            self._require_a_server()
            tries += 1
            failed.add(server)
            others = [other for other in self._usable() if other not in failed]
            pause_now_s = 0.0 if others else pause_s * (0.75 + 0.5 * self._jitter.random())
            if deadline - time.monotonic() <= pause_now_s:
                raise RequestFailed(cause, f"{self._last_error} (given up after {tries} tries)")
            self._on_retry(cause)
            if others:
                self._move(lease, min(others, key=lambda other: other.fullness))
            else:
                await asyncio.sleep(pause_now_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                failed.clear()

    async def _find_another(self, lease: Lease) -> float:
        """Move to the best server that is up with the right weights; seconds that none was. They are looked at, not tried."""
        began = time.monotonic()
        while True:
            self._require_a_server()
            self._move(lease, self._least_loaded())
            if lease.server.lost_since is None:
                return time.monotonic() - began
            self._on_outage()
            self._back.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._back.wait()

    def _move(self, lease: Lease, server: StudentServer) -> None:
        lease.server.rollouts -= 1
        lease.server = server
        server.rollouts += 1

    def _least_loaded(self) -> StudentServer:
        """Of the usable servers; where there is none, one that only rests first."""
        return min(self._usable() or self._servers, key=lambda server: (server.lost_since is not None, server.fullness))

    def _usable(self) -> list[StudentServer]:
        return [server for server in self._servers if server.usable]

    # What becomes of a server

    def _require_a_server(self) -> None:
        """Raises `ServerError` when there is none left to wait for."""
        lost = [server.lost_since for server in self._servers]
        newest = max((moment for moment in lost if moment is not None), default=0.0)
        if None not in lost and time.monotonic() - newest > self._unreachable_s:
            troubles = "; ".join(server.trouble for server in self._servers)
            raise ServerError(f"{troubles} (last error: {self._last_error})")

    def _set_aside(self, server: StudentServer, why: str) -> None:
        if server.old_weights is None:
            server.old_weights, server.old_since = why, time.monotonic()
            logger.warning("%s gets no more requests until its weights are right: %s", server.name, why)

    async def _look_at(self, server: StudentServer) -> None:
        """Follow one server for as long as the pool is open."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s if server.usable else min(LOOK_AGAIN_S, self._look_every_s)):
                    await server.doubted.wait()
            server.doubted.clear()
            cap = self.cap
            try:
                await self._look_once(server)
            except TimeoutError:
                # A server that is merely busy answers late: it is only left if another can take its requests.
                if server.unanswered() and any(other is not server for other in self._usable()):
                    logger.warning("%s does not answer; its requests go elsewhere", server.name)
                    server.failed("connection")
                    server.abort_attempts()
            except (ConnectionError, ValueError, KeyError, TypeError) as error:
                logger.debug("%s: %r", server.name, error)
                if isinstance(error, ConnectFailed):
                    # Nobody listens there any more: what it was asked is not answered, even if its connection still stands.
                    server.failed("connection")
                    server.abort_attempts()
            if self.cap != cap:
                self.changed.set()

    async def _look_once(self, server: StudentServer) -> None:
        if server.down_since is None and server.old_weights is None:
            load = await server.client.load() if server.has_metrics else None
            if load is None:
                await server.client.healthy()
            server.note_load(load)
            server.cap.observe(load, server.rollouts)
            return
        if not await server.client.healthy():
            return
        version = await server.client.weight_version(self._adapter)
        if version is not None and self._held is not None and not (version.isdecimal() and int(version) >= self._held):
            self._set_aside(server, f"it serves weights {version!r} although it should hold version {self._held}")
        elif server.old_weights is None or version is not None:
            logger.info("%s is back", server.name)
            server.old_weights = None
        server.looked_well()
        if server.usable:
            self._back.set()

    # For messages and metrics

    @property
    def trouble(self) -> str:
        """The newest error, if no request has succeeded since; for messages."""
        return f" (last error: {self._last_error})" if self._last_error else ""

    def describe(self) -> str:
        """The servers by name, with what is wrong with them."""
        return ", ".join(server.client.base_url if server.usable else server.trouble for server in self._servers)

    def gauges(self) -> dict[str, float]:
        values = {"rollout/concurrency": float(self.in_flight), "rollout/concurrency_cap": self.cap}
        for server in self._servers:
            values |= server.gauges()
        return values
