"""Weights to servers on other GPUs (NCCL), or over the network to CPU servers (gloo): one broadcast per bucket.

    rank 0 ── TCPStore ── every worker of every server:  one process group beside everyone's own
    update call in a thread per server │ buckets one after the other ─▶ workers load one while the next arrives

Nobody hangs: every wait polls with a deadline and looks whether a server's call has failed meanwhile; then the group is given
up on both sides, and the next try makes a new one of those that are left.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainers.errors import ServerError, WeightSyncError
from trainers.weight_sync.layout import Layout
from trainers.weight_sync.members import Member, begin, finish
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.ways import Results, connect, introduce, update_member

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 30.0
# Far above any deadline of ours: torch's own watchdog would end the process.
GROUP_TIMEOUT = timedelta(days=7)
DEVICE_BUFFERS = 2


class Broadcast:
    """Way `nccl`. `device`: of rank 0; `backend`: "nccl", or "gloo" between CPUs.

    `timeout_s`: seconds after which a broadcast counts as failed.
    """

    name: ClassVar[str] = "nccl"
    on_host: ClassVar[bool] = False
    every_rank: ClassVar[bool] = False

    def __init__(self, device: torch.device, backend: str, timeout_s: float) -> None:
        self.device, self.backend, self.timeout_s = device, backend, timeout_s
        self.group: Any = None
        self.store: TCPStore | None = None
        self.token = ""
        self.joined: list[Member] = []
        self.works: list[Any] = []  # broadcasts that were begun
        self.bytes_sent = 0

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """See `Way.send`."""
        layout = staging.layout
        assert layout is not None, "nothing is staged"
        self.bytes_sent = layout.nbytes
        info = {"layout": layout.id, "timeout_s": self.timeout_s}
        return self.send_parts(members, layout, info, staging.buckets, version)

    def send_parts(
        self, members: Sequence[Member], layout: Layout, info: dict[str, Any], parts: list[torch.Tensor], version: int
    ) -> Results:
        """Every member gets the same update call and the same broadcasts of `parts` (uint8)."""
        if failed := self._join(members):
            return failed

        def one(member: Member) -> Seconds:
            introduce(member, layout)
            return update_member(member, info, version)

        futures = begin(members, one)
        try:
            self._broadcast(parts, futures)
        except (RuntimeError, TimeoutError) as error:
            logger.warning("the broadcast of version %d failed: %s", version, error)
            self.close()
        results = finish(futures)
        if any(isinstance(result, ServerError) for result in results.values()):
            self.close()
        return results

    def close(self) -> None:
        """Give the group up; whoever still waits in it gets an error."""
        if self.group is not None:
            release(self.backend, self.group, self.works)
        self.group, self.store, self.joined, self.works = None, None, [], []

    # The group -------------------------------------------------------------------------------------------------------

    def _join(self, members: Sequence[Member]) -> Results:
        """Make a group with the members' workers unless there is one; returns all members with an error if that failed."""
        if self.group is not None and set(self.joined) == set(members) and all(m.channel == self.token for m in members):
            return {}
        self.close()
        host = address_towards(members[0].client.url)
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_TIMEOUT_S))
        token = self.token = uuid.uuid4().hex
        world_size = 1 + sum(len(member.workers) for member in members)
        first: dict[Member, int] = {}
        rank = 1
        for member in members:
            first[member] = rank
            rank += len(member.workers)
        group = {"backend": self.backend, "host": host, "port": self.store.port, "token": token, "world_size": world_size}

        def one(member: Member) -> None:
            connect(member, token, {"transport": "broadcast", "group": group | {"first_rank": first[member]}})

        futures = begin(members, one)
        mine = in_daemon(make_group, self.backend, self.store, token, world_size, host, self.device)
        began = time.monotonic()
        deadline = began + CONNECT_TIMEOUT_S + 5
        while not mine.done() and time.monotonic() < deadline and not failure_of(futures):
            time.sleep(1e-3)
        if mine.done() and mine.exception() is None and not failure_of(futures):
            results = finish(futures)
            if not any(isinstance(result, ServerError) for result in results.values()):
                self.group, self.joined = mine.result(), list(members)
                return {}
        own = mine.exception() if mine.done() else None
        cause = failure_of(futures) or own or _absent(futures, first, deadline - began)
        self.close()
        return {m: ServerError(f"{m.client.url}: no process group with the servers: {cause}") for m in members}

    def _broadcast(self, parts: list[torch.Tensor], futures: dict[Member, Future[Seconds]]) -> None:
        options = from_here(self.backend, self.timeout_s)
        deadline = time.monotonic() + self.timeout_s
        self.works = []
        if self.backend != "nccl" or all(part.device.type == "cuda" for part in parts):
            self.works = [self.group.broadcast([part], options) for part in parts]
            for work in self.works:
                wait(work, deadline, futures)
            return
        largest = max(part.numel() for part in parts)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(DEVICE_BUFFERS)]
        running: list[Any] = []
        for at, part in enumerate(parts):
            if len(running) == DEVICE_BUFFERS:
                wait(running.pop(0), deadline, futures)
            buffer = buffers[at % DEVICE_BUFFERS][: part.numel()]
            buffer.copy_(part, non_blocking=True)
            running.append(self.group.broadcast([buffer], options))
            self.works.append(running[-1])
        for work in running:
            wait(work, deadline, futures)


def _absent(futures: dict[Member, Future[None]], first: dict[Member, int], waited_s: float) -> str:
    """Which ranks a group waited for in vain."""
    late = [
        f"rank {first[member] + worker} ({member.client.url})"
        for member, future in futures.items()
        if not future.done()
        for worker in range(len(member.workers))
    ]
    return f"{', '.join(late) or 'rank 0 (the trainer)'} did not come within {waited_s:.0f} s"


def in_daemon(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """In a thread that does not keep the process alive: making a group may wait long for a member that is gone."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight group", daemon=True).start()
    return future


def failure_of(futures: dict[Member, Future[Any]]) -> BaseException | None:
    return next((future.exception() for future in futures.values() if future.done() and future.exception()), None)


def wait(work: Any, deadline: float, futures: dict[Member, Future[Any]]) -> None:
    """Until a broadcast has ended. Raises `TimeoutError` at the deadline, or when a server's call has failed meanwhile."""
    pause = 20e-6
    while not work.is_completed():
        if failure := failure_of(futures):
            raise TimeoutError(f"a server gave up: {failure}")
        if time.monotonic() > deadline:
            raise TimeoutError("the servers did not take it in time")
        time.sleep(pause)
        pause = min(pause * 1.5, 2e-3)
    work.wait()


def make_group(backend: str, store: Store, token: str, world_size: int, host: str, device: torch.device) -> Any:
    """Rank 0 of the group; a first broadcast makes the connections, which NCCL leaves to the first use."""
    store = PrefixStore(token, store)
    if backend == "nccl":
        torch.cuda.set_device(device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        group: Any = dist.ProcessGroupNCCL(store, 0, world_size, options)
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # type: ignore[attr-defined]
        group = dist.ProcessGroupGloo(store, 0, world_size, options)
        group._set_default_timeout(GROUP_TIMEOUT)
    hello = torch.zeros(4, dtype=torch.uint8, device=device if backend == "nccl" else "cpu")
    wait(group.broadcast([hello], from_here(backend, CONNECT_TIMEOUT_S)), time.monotonic() + CONNECT_TIMEOUT_S, {})
    return group


def from_here(backend: str, timeout_s: float) -> dist.BroadcastOptions:
    """gloo ends an operation by itself at the time limit; NCCL must not, because its watchdog would end the process."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=timeout_s) if backend == "gloo" else GROUP_TIMEOUT
    return options


def release(backend: str, group: Any, works: list[Any]) -> None:
    """Give a group up. A gloo group whose operation is pending would freeze the process when it is destroyed, so it is kept
    until the operation has ended, by its time limit at the latest."""

    def run() -> None:
        if backend == "nccl":
            group.abort()
        while not all(work.is_completed() for work in works):
            time.sleep(0.1)

    threading.Thread(target=run, name="weight group", daemon=True).start()


def address_towards(url: str) -> str:
    """This machine's address as the server at `url` can reach it. Raises `WeightSyncError` where there is no way."""
    parts = urlsplit(url)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"{url} cannot be reached for a broadcast: {error}") from error
