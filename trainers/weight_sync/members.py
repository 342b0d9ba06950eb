"""The servers of a run as members of one group: who is in, who left, who came back.

    asked at every sync:  out and healthy again ─▶ facts ─▶ in, to be sent everything
                          in ─▶ failed twice ─▶ out if others remain, else the sync fails

A member that is out keeps its old version, so the rollout side gives it no requests; what comes back gets the current weights
before it is counted in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainers.errors import ServerCapabilityError, ServerError
from trainers.inference import InferenceEngine
from trainers.server import ServerFacts

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class Member:
    """What the trainer knows of a server. All but `client` is forgotten when a call to it fails: it may be another process."""

    client: InferenceEngine
    facts: ServerFacts | None = None  # None: not in the group
    layouts: set[str] = field(default_factory=set)  # ids of those it was told of
    channel: str | None = None  # the folder, memory or process group it was told of last
    complete: bool = False  # it got every parameter once
    version: str | None = None  # that it took last
    mirrors: str | None = None  # the update that sparse ones may build on
    reported: bool = False  # that it is out was logged

    @property
    def workers(self) -> list[dict[str, Any]]:
        """What each of its workers says of itself; none where the server has none of our methods."""
        return list(self.facts.workers) if self.facts else []

    def forget(self) -> None:
        self.layouts.clear()
        self.channel, self.complete, self.version, self.mirrors = None, False, None, None


class Members:
    """`clients`: every server of the run, in the group or not."""

    def __init__(self, clients: Iterable[InferenceEngine]) -> None:
        self.all = [Member(client) for client in clients]

    @property
    def inside(self) -> list[Member]:
        return [member for member in self.all if member.facts is not None]

    def gather(self, look: Callable[[InferenceEngine], ServerFacts]) -> list[Member]:
        """Take in whoever answers; returns who came. `look` raises `ServerError` for a server that is not there (yet).

        At the first call every server must be there; later only one of them.

        Raises:
            ServerCapabilityError: one cannot do what the run needs.
            ServerError: none is there.
        """
        outside = [member for member in self.all if member.facts is None]
        first = len(outside) == len(self.all)
        came: list[Member] = []
        for member, found in each(outside, lambda member: look(member.client)).items():
            if isinstance(found, ServerCapabilityError) or (first and isinstance(found, Exception)):
                raise found
            if isinstance(found, ServerError):
                continue
            member.forget()
            member.facts, member.reported = found, False
            came.append(member)
            if not first:
                logger.warning("%s is back and gets the current weights", member.client.url)
        if not self.inside:
            raise ServerError("no student server answers: " + ", ".join(member.client.url for member in self.all))
        return came

    def leave(self, member: Member, why: Exception) -> None:
        """Out until it answers again."""
        member.facts = None
        member.forget()
        if not member.reported:
            logger.warning("%s leaves the group, the others go on: %s", member.client.url, why)
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
