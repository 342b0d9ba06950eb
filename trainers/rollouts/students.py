"""The servers of a pool: who is one, and what state each is in.

    every few seconds, each server: /metrics ─▶ its cap;  a server that failed: /health and its weights ─▶ usable again
    trainer: `listed` ─▶ new ones connected, those no longer listed left at once
    `open`: whoever answers first is enough; the others join when they answer

Invariant: a server whose weights are older than those it confirmed is not usable until it holds newer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from trainers.errors import ServerError
from trainers.rollouts.client import GenerateClient, ServerFacts
from trainers.rollouts.concurrency import AdaptiveCap
from trainers.rollouts.http import ConnectFailed
from trainers.rollouts.protocol import SamplingForm
from trainers.rollouts.student_server import StudentServer

logger = logging.getLogger(__name__)
LOOK_AGAIN_S = 0.5  # at a server that is not usable


class Students:
    """Connects to the servers, looks at them and follows the trainer's list of them. Arguments as of `ServerPool`."""

    def __init__(
        self,
        urls: Sequence[str],
        ceiling: int,
        form: SamplingForm,
        *,
        unreachable_s: float,
        look_every_s: float,
        latecomers_s: float,
    ) -> None:
        self.changed = asyncio.Event()  # set when the cap moved; whoever waits clears it
        self.back = asyncio.Event()  # set when a server is usable again, or new
        self.all = [
            StudentServer(f"student-{index}", GenerateClient(url, form), AdaptiveCap(ceiling, None, 1))
            for index, url in enumerate(urls)
        ]
        self.joining: dict[str, asyncio.Task[None]] = {}  # by URL
        self._ceiling, self._form = ceiling, form
        self._unreachable_s, self._look_every_s, self._latecomers_s = unreachable_s, look_every_s, latecomers_s
        self._held: int | None = None  # the version asked for by the newest request, of adapters the newest asked for
        self._adapter: str | None = None  # which it is, where it is one
        self._shortest = 1  # max_model_len that every server must have
        self._looks: dict[StudentServer, asyncio.Task[None]] = {}
        self._wanted = {server.client.base_url: server.name for server in self.all}  # URL → name, as last told
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def cap(self) -> float:
        """Most rollouts in flight now."""
        caps = [server.cap.value for server in self.usable() or self.all]
        return max(1.0, min(self._ceiling, sum(caps)))

    def usable(self) -> list[StudentServer]:
        return [server for server in self.all if server.usable]

    def least_loaded(self) -> StudentServer:
        """Of the usable servers; where there is none, one that only rests first."""
        return min(self.usable() or self.all, key=lambda server: (server.lost_since is not None, server.fullness))

    def asked_for(self, version: int | None, adapter: str | None) -> None:
        """A request asks for these weights."""
        if adapter is None or self._held is None or version is None or version >= self._held:
            self._held, self._adapter = version, adapter

    def set_aside(self, server: StudentServer, why: str) -> None:
        if server.old_weights is None:
            server.old_weights, server.old_since = why, time.monotonic()
            logger.warning("%s gets no more requests until its weights are right: %s", server.name, why)

    async def open(self, wait_s: float) -> int:
        """Connect to the servers, waiting up to `wait_s` for the first to answer, and begin to look at them. Returns the least
        `max_model_len` of those that did.

        Those that do not answer soon after the first one join when they do.

        Raises:
            ServerError: none answers, or one refuses the key.
        """
        opening = {asyncio.create_task(server.client.open(wait_s)): server for server in self.all}
        try:
            facts = await self._first_answers(opening)
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
        for late in [server for server in self.all if server not in facts]:
            url = late.client.base_url
            logger.warning("%s (%s) does not answer yet: the run begins without it", late.name, url)
            self.all.remove(late)
            await late.client.close()
            self.joining[url] = asyncio.create_task(self._join(late.name, url))
        lengths = [fact.max_model_len for fact in facts.values()]
        self._shortest = min(lengths)
        if len(set(lengths)) > 1:
            logger.warning("the servers' max_model_len differ, the least is used: %s", lengths)
        for server, fact in facts.items():
            self._begin(server, fact)
        return self._shortest

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
        tasks = [*self._looks.values(), *self.joining.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self.all))

    def listed(self, servers: Sequence[tuple[str, str]]) -> None:
        """The servers from now on, as (name, URL); at least one. A new one holds the current weights and gets requests once it
        is connected. The requests of one that is no longer listed go elsewhere at once."""
        self._wanted = {url: name for name, url in servers}
        for url in self.joining.keys() - self._wanted.keys():
            self.joining.pop(url).cancel()
        known = {server.client.base_url for server in self.all} | self.joining.keys()
        for url, name in self._wanted.items():
            if url not in known:
                self.joining[url] = asyncio.create_task(self._join(name, url))
        self._drop_unlisted()

    def _drop_unlisted(self) -> None:
        """Unless none would be left: then when the first new one is connected."""
        if any(server.client.base_url in self._wanted for server in self.all):
            for server in [server for server in self.all if server.client.base_url not in self._wanted]:
                self._leave(server)

    def _leave(self, server: StudentServer) -> None:
        logger.info("%s (%s) is no longer one of the servers", server.name, server.client.base_url)
        self.all.remove(server)
        server.removed = True
        self._looks.pop(server).cancel()
        server.abort_attempts()
        closing = asyncio.create_task(server.client.close())
        self._leaving.add(closing)
        closing.add_done_callback(self._leaving.discard)
        self._changed_members()

    async def _join(self, name: str, url: str) -> None:
        client, told = GenerateClient(url, self._form), ""
        try:
            while True:
                try:
                    facts = await client.open(self._unreachable_s)
                    break
                except ServerError as error:
                    if str(error) != told:
                        logger.warning("%s does not join yet: %s", name, error)
                    told = str(error)
                    await client.close()
                    await asyncio.sleep(self._look_every_s)  # it may have been refused at once
        except BaseException:
            await client.close()
            raise
        self.joining.pop(url, None)
        server = StudentServer(name, client, AdaptiveCap(self._ceiling, None, 1))
        self.all.append(server)
        self._begin(server, facts)
        logger.info("%s (%s) is one of the servers now", name, url)
        self._drop_unlisted()
        self._changed_members()

    def _changed_members(self) -> None:
        self.back.set()
        self.changed.set()

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
                if server.unanswered() and any(other is not server for other in self.usable()):
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
            self.set_aside(server, f"it serves weights {version!r} although it should hold version {self._held}")
        elif server.old_weights is None or version is not None:
            logger.info("%s is back", server.name)
            server.old_weights = None
        server.looked_well()
        if server.usable:
            self.back.set()
