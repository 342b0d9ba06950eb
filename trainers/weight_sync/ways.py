"""The seam of `sync.ServerSync`: one way for staged buckets to reach the members. Only rank 0 calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from trainers.errors import ServerError
from trainers.weight_sync.layout import Layout
from trainers.weight_sync.members import Member
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds, update

Results = dict[Member, Seconds | ServerError]


class Way(Protocol):
    name: ClassVar[str]
    bytes_sent: int  # of the last `send`, to one server
    on_host: ClassVar[bool]  # buckets are wanted in host memory
    every_rank: ClassVar[bool]  # buckets are wanted on every rank, not on rank 0 alone

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """Bring every member what is staged, connecting those that are not; each was resumed, whatever became of it.

        Raises:
            WeightSyncError: nothing could be sent to anybody.
        """
        ...

    def close(self) -> None: ...


def introduce(member: Member, layout: Layout) -> None:
    """Tell a server of a layout, once. Raises `ServerError`."""
    if layout.id not in member.layouts:
        member.client.init_weight_transfer({"layout": layout.wire, "partial": layout.partial})
        member.layouts.add(layout.id)


def connect(member: Member, channel: str, transport: dict[str, Any]) -> None:
    """Tell a server of a transport, once; `channel` names what it is told. Raises `ServerError`."""
    if member.channel != channel:
        member.client.init_weight_transfer(transport)
        member.channel = channel


def update_member(
    member: Member, info: dict[str, Any], version: int, rounds: Sequence[Callable[[], dict[str, Any]]] = (dict,)
) -> Seconds:
    """One cycle, with an update call for each of `rounds`: what it returns is added to `info`. Raises `ServerError`."""
    facts = member.facts
    assert facts is not None, f"{member.client.url} is not in the group"
    calls = [lambda bring=bring: info | {"version": str(version)} | bring() for bring in rounds]
    return update(member.client, calls, version, one_call=facts.one_call)
