"""Servers that come, go and are started anew while a run goes on: what the trainer sees of it, and whom it tells.

    servers.json ─▶ members (new ones outside the group until they hold the weights)
    while rank 0 waits for rollouts: a new or restarted server answers ─▶ `ServerSync.admit` ─▶ rollout process: "servers"
    after every sync ─▶ serving.json

Only rank 0 uses it. Nothing here raises for what a server does, and nothing waits for one that hangs: looks run in threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from trainers.errors import ServerError
from trainers.inference import InferenceEngine
from trainers.roster import Listed, Roster, Serving, write_serving
from trainers.weight_sync.members import Member, Members, begin

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 3.0
LOOK_PATIENCE_S = 0.01  # one try
ANSWER_S = 15.0


class Watch:
    """Args:
    folder: the run's.
    connect: makes the client of a new server from its URL.
    """

    def __init__(self, members: Members, roster: Roster, folder: Path, connect: Callable[[str], InferenceEngine]) -> None:
        self._members, self._roster, self._folder, self._connect = members, roster, folder, connect
        self._told = {member.client.url for member in members.all}
        self._next_look = 0.0
        self._looks: dict[Member, tuple[Future[str], str | None]] = {}  # and the version that it should serve
        self._answered: set[Member] = set()  # at the last look

    def refresh(self) -> None:
        """Make the members those of servers.json, if it was written."""
        servers = self._roster.read()
        if servers is None:
            return
        come, gone = self._members.become(servers, self._connect)
        for member in come:
            logger.info("%s (%s) is a new server of this run", member.name, member.client.url)
        for member in gone:
            logger.info("%s (%s) is no longer a server of this run", member.name, member.client.url)

    def wanting(self) -> bool:
        """Whether somebody is to be taken in or let go. Does not wait; a look at every server is begun each few seconds."""
        for member, (look, expected) in list(self._looks.items()):
            if look.done():
                del self._looks[member]
                self._note_look(member, look, expected)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            idle = [member for member in self._members.all if member not in self._looks]
            self._looks |= {member: (look, member.version) for member, look in begin(idle, _look).items()}
        return self._roster.changed or any(
            member.facts is None and member.refused is None and member in self._answered and now >= member.retry_at
            for member in self._members.all
        )

    def _note_look(self, member: Member, look: Future[str], expected: str | None) -> None:
        self._answered.discard(member)
        error = look.exception()
        if isinstance(error, ServerError):
            return
        served = look.result()
        self._answered.add(member)
        # After a sync the look is of no use: it may have been made before or after.
        if member.facts is not None and member.version == expected != served:
            self._members.leave(member, ServerError(f"it was started anew and serves weights {served!r}"))
            member.retry_at = 0.0

    def serving(self) -> list[str]:
        """URLs of the servers that answer within seconds and hold the policy."""
        looks = begin(self._members.inside, _look)
        wait(looks.values(), ANSWER_S)
        good = [member for member, look in looks.items() if look.done() and look.exception() is None]
        return [member.client.url for member in good if looks[member].result() == member.version]

    def note(self) -> None:
        """Write down who serves what."""
        serving = [
            Serving(
                member.name,
                member.client.url,
                int(member.version) if member.facts is not None and member.version is not None else None,
                member.why,
            )
            for member in self._members.all
        ]
        try:
            write_serving(self._folder, serving)
        except OSError as error:
            logger.warning("who serves which weights could not be written down: %s", error)

    def news(self) -> list[Listed] | None:
        """The servers that rollouts may use, if they are others than at the last call: all that ever held the weights."""
        servers = [Listed(member.name, member.client.url) for member in self._members.all if member.joined]
        urls = {server.url for server in servers}
        if urls == self._told or not urls:
            return None
        self._told = urls
        return servers


def _look(member: Member) -> str:
    return member.served(LOOK_PATIENCE_S)
