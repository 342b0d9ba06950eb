"""The servers of a run as members of one group: who is in, who left, who came back.

    asked at every sync:  out and healthy again, or new ─▶ facts ─▶ in, to be sent everything
                          in ─▶ failed twice ─▶ out if others remain
                          no longer listed ─▶ forgotten

A member that is out keeps its old version, so the rollout side gives it no requests; what comes back gets the current weights
before it is counted in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainers.errors import ServerCapabilityError, ServerError
from trainers.inference import InferenceEngine
from trainers.roster import Listed
from trainers.server import ServerFacts

logger = logging.getLogger(__name__)
T = TypeVar("T")
GATHER_EVERY_S = 0.5
RETRY_S = 30.0
LATECOMERS_S = 10.0  # at the start, the others are waited for so long once one server has answered


@dataclass(eq=False)
class Member:
    """What the trainer knows of a server. All but `client` is forgotten when a call to it fails: it may be another process."""

    client: InferenceEngine
    name: str = ""
    facts: ServerFacts | None = None  # None: not in the group
    layouts: set[str] = field(default_factory=set)  # ids of those it was told of
    channel: str | None = None  # the folder, memory or process group it was told of last
    complete: bool = False  # it got every parameter once
    version: str | None = None  # that it took last
    mirrors: str | None = None  # the update that sparse ones may build on
    reported: bool = False  # that it is out was logged
    updates: int = 0  # it took since it came in
    joined: bool = False  # it held the policy's weights once, so rollouts may know of it
    why: str = ""  # it is out
    refused: str | None = None  # why it is not asked again
    retry_at: float = 0.0  # monotonic; until then nobody waits for it to come in

    @property
    def workers(self) -> list[dict[str, Any]]:
        """What each of its workers says of itself; none where the server has none of our methods."""
        return list(self.facts.workers) if self.facts else []

    def served(self, patience_s: float) -> str:
        """The version it serves, once it answers. Raises `ServerError`."""
        self.client.wait_healthy(patience_s)
        return self.client.weight_version()

    def forget(self) -> None:
        self.layouts.clear()
        self.channel, self.complete, self.version, self.mirrors, self.updates = None, False, None, None, 0


class Members:
    """`clients`: every server of the run, in the group or not."""

    def __init__(self, clients: Iterable[InferenceEngine]) -> None:
        self.all = [Member(client, f"student-{index}") for index, client in enumerate(clients)]
        self.begun = False  # one of the first servers was there, and the others had their time

    @property
    def inside(self) -> list[Member]:
        return [member for member in self.all if member.facts is not None]

    def become(self, servers: Sequence[Listed], connect: Callable[[str], InferenceEngine]) -> tuple[list[Member], list[Member]]:
        """These are the run's servers from now on; who is new, and who is gone."""
        known = {member.client.url: member for member in self.all}
        before, self.all = self.all, []
        for server in servers:
            member = known.get(server.url) or Member(connect(server.url))
            member.name = server.name
            self.all.append(member)
        return [m for m in self.all if m not in before], [m for m in before if m not in self.all]

    def gather(
        self,
        look: Callable[[InferenceEngine], ServerFacts],
        patience_s: float = 0.0,
        refresh: Callable[[], None] = lambda: None,
    ) -> list[Member]:
        """Take in whoever answers; returns who came. `look` raises `ServerError` for a server that is not there (yet).

        One must be there, and is waited for. At the first call the others are given a moment more: who is not there then is
        taken in like a new one, once it answers. `refresh` brings `all` up to date.

        Raises:
            ServerCapabilityError: one of the first servers cannot do what the run needs; a later one is refused.
            ServerError: none is there within `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        begins_by = deadline
        came: list[Member] = []
        while True:
            refresh()
            outside = [member for member in self.all if member.facts is None and member.refused is None]
            missing: dict[Member, ServerError] = {}
            for member, found in each(outside, lambda member: look(member.client)).items():
                if isinstance(found, ServerCapabilityError) and not member.joined:
                    if not self.begun:
                        raise found
                    self.refuse(member, found)
                elif isinstance(found, ServerError):
                    missing[member] = found
                    if isinstance(found, ServerCapabilityError):  # another program may have its address for a while
                        member.retry_at = time.monotonic() + RETRY_S
                else:
                    begins_by = min(begins_by, time.monotonic() + LATECOMERS_S)
                    self._enter(member, found)
                    came.append(member)
            came = [member for member in came if member in self.all]
            now = time.monotonic()
            if self.inside and (self.begun or not missing or now >= begins_by):
                self._begin_without(missing)
                return came
            if now >= deadline:
                urls = ", ".join(member.client.url for member in self.all)
                whys = [*missing.values(), *(member.refused for member in self.all if member.refused)]
                raise ServerError(f"waited {patience_s:.0f} s for a student server ({urls}): {whys[0]}")
            time.sleep(GATHER_EVERY_S)

    def _begin_without(self, missing: dict[Member, ServerError]) -> None:
        if self.begun:
            return
        self.begun = True
        for member, error in missing.items():
            member.why, member.reported = str(error), True
            logger.warning("%s is not there: the run begins without it, and takes it in once it answers", member.client.url)

    def _enter(self, member: Member, facts: ServerFacts) -> None:
        member.forget()
        member.facts, member.reported, member.why = facts, False, ""
        if self.begun:
            logger.warning("%s is %s and gets the current weights", member.client.url, "back" if member.joined else "new")

    def refuse(self, member: Member, why: Exception) -> None:
        """Out for as long as it is listed."""
        member.reported = True
        self.leave(member, why)
        member.refused = str(why)
        logger.warning("%s (%s) is not used: %s", member.name, member.client.url, why)

    def leave(self, member: Member, why: Exception) -> None:
        """Out until it answers again."""
        member.facts, member.why, member.retry_at = None, str(why), time.monotonic() + RETRY_S
        member.forget()
        if not member.reported:
            others = "the others go on" if self.inside else "nobody is left, a server is waited for"
            logger.warning("%s leaves the group, %s: %s", member.client.url, others, why)
            member.reported = True


def each(members: Sequence[Member], work: Callable[[Member], T]) -> dict[Member, T | ServerError]:
    """`work` for every member at the same time; what raised a `ServerError` has it as its result."""
    return finish(begin(members, work))


def begin(members: Sequence[Member], work: Callable[[Member], T]) -> dict[Member, Future[T]]:
    """Like `each`, not waited for. Threads end with their work, whatever becomes of the caller."""
    threads = ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="weight sync")
    futures = {member: threads.submit(work, member) for member in members}
    threads.shutdown(wait=False)
    return futures


def finish(futures: dict[Member, Future[T]]) -> dict[Member, T | ServerError]:
    results: dict[Member, T | ServerError] = {}
    failure: BaseException | None = None
    for member, future in futures.items():
        try:
            results[member] = future.result()
        except ServerError as error:
            results[member] = error
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results
