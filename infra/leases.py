"""Who may use which port and GPU of this machine, and which processes belong to whom.

    LeaseManager ──insert──▶ registry rows (kind, host, resource: unique) ◀──reap── infra.reaper
        └─ one thread renews every held row

A lease's id is the mark (`LOOPWRIGHT_LEASE`) of the processes started under it, so the row comes before the process and goes
after it. Ports are bound, not guessed: the socket stays bound (never listening) while the lease is held. Linux lets the
server bind beside it, since both set SO_REUSEADDR, and lets nobody in who does not.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.errors import NotEnoughGPUs, PortTaken
from infra.gpus import visible_gpus
from infra.registry import Owner, Registry

logger = logging.getLogger(__name__)

TTL_S = 600.0
RENEW_S = 60.0
# Below the kernel's range for outgoing connections, so that none of those takes a port between two looks.
PORTS = range(20000, 30000)
PORT_TRIES = 200


@dataclass
class Lease:
    """A held row. `lost` turns true when a renewal found the row gone: somebody reaped it, stop using the resource."""

    id: str
    kind: str
    resource: str
    lost: bool = False
    role: str = ""  # of a GPU: what it computes
    since: float = 0.0  # of a GPU: by the manager's clock


@dataclass
class PortLease(Lease):
    host: str = "127.0.0.1"
    socket: socket.socket | None = field(default=None, repr=False)

    @property
    def port(self) -> int:
        return int(self.resource)


@dataclass
class GpuLease:
    """`devices` are NVML indices, the numbers CUDA uses under CUDA_DEVICE_ORDER=PCI_BUS_ID. Empty on a CPU machine."""

    leases: list[Lease] = field(default_factory=list)

    @property
    def devices(self) -> list[int]:
        return [int(lease.resource) for lease in self.leases]


class LeaseManager:
    """Takes leases for `owner` (default: this process) and renews them until released. Close it, or use it in `with`."""

    def __init__(
        self,
        registry: Registry,
        owner: Owner | None = None,
        ttl_s: float = TTL_S,
        renew_s: float = RENEW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.owner = owner or Owner.current()
        self.ttl_s, self.renew_s, self._clock = ttl_s, renew_s, clock
        self._held: dict[str, Lease] = {}
        self._gpu_s: Counter[str] = Counter()  # of GPUs that were released, by role
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def lease_port(self, run_id: str | None = None, port: int | None = None, host: str = "127.0.0.1") -> PortLease:
        """A bound port; `port` asks for that one. PortTaken when it is leased or something listens there, or nothing can."""
        candidates = [port] if port is not None else random.sample(PORTS, PORT_TRIES)
        why = ""
        for candidate in candidates:
            row = self.registry.insert_lease("port", str(candidate), self.owner, self.ttl_s, run_id)
            if row is None:
                why = f"port {candidate} is leased to another process (`loopwright reap` frees it if that one is dead)"
                continue
            try:
                bound = bind(host, candidate)
            except OSError as error:
                self.registry.delete_lease(row.id)
                if error.errno != errno.EADDRINUSE:
                    remedy = "name an IPv4 address of this machine, and a port above 1023"
                    raise PortTaken(f"nothing can listen at {host}:{candidate} ({error.strerror}): {remedy}") from error
                why = f"port {candidate} is in use by a process that is not ours ({error.strerror})"
                continue
            lease = PortLease(row.id, "port", row.resource, host=host, socket=bound)
            self._hold(lease)
            return lease
        raise PortTaken(
            why if port is not None else f"none of {PORT_TRIES} ports in {PORTS.start}-{PORTS.stop - 1} is free: {why}"
        )

    def lease_gpus(self, count: int, run_id: str | None = None, role: str = "trainer") -> GpuLease:
        """`count` GPUs nobody has leased; 0 gives an empty lease. NotEnoughGPUs when there are fewer.

        `role`: under which `gpu_seconds` counts them.
        """
        if count == 0:
            return GpuLease()
        present = visible_gpus()
        rows = self.registry.insert_leases("gpu", [str(i) for i in present], count, self.owner, self.ttl_s, run_id)
        if rows is None:
            taken = {row.resource for row in self.registry.list_leases("gpu", self.owner.host)}
            free = [index for index in present if str(index) not in taken]
            raise NotEnoughGPUs(
                f"{count} GPUs are asked for; this machine has {len(present)}, of which {len(free)} are free: {free}"
            )
        leases = [Lease(row.id, "gpu", row.resource, role=role, since=self._clock()) for row in rows]
        for lease in leases:
            self._hold(lease)
        return GpuLease(leases)

    def lease_process(self, name: str, run_id: str | None = None) -> Lease:
        """A mark for a process that needs neither port nor GPU (a trainer on CPU), so that the reaper finds it."""
        lease = self.lease_name("process", f"{name}/{os.urandom(8).hex()}", run_id)
        assert lease is not None, "a random name was taken"
        return lease

    def lease_name(self, kind: str, name: str, run_id: str | None = None) -> Lease | None:
        """A name that one process of this machine may have; None: another has it."""
        row = self.registry.insert_lease(kind, name, self.owner, self.ttl_s, run_id)
        if row is None:
            return None
        lease = Lease(row.id, kind, row.resource)
        self._hold(lease)
        return lease

    def release(self, lease: Lease | GpuLease) -> None:
        """Free the row, and the socket of a port. Stop the processes first. Releasing twice is harmless."""
        for one in lease.leases if isinstance(lease, GpuLease) else [lease]:
            with self._lock:
                if self._held.pop(one.id, None) is not None and one.kind == "gpu":
                    self._gpu_s[one.role] += self._clock() - one.since  # type: ignore[assignment]
            if isinstance(one, PortLease) and one.socket is not None:
                one.socket.close()
                one.socket = None
            self.registry.delete_lease(one.id)

    def gpu_seconds(self) -> dict[str, float]:
        """For how long GPUs were held so far, by role: two GPUs for a minute are 120."""
        with self._lock:
            seconds = Counter(self._gpu_s)
            for lease in self._held.values():
                if lease.kind == "gpu":
                    seconds[lease.role] += self._clock() - lease.since  # type: ignore[assignment]
        return dict(seconds)

    def held(self) -> list[Lease]:
        with self._lock:
            return list(self._held.values())

    def close(self) -> None:
        """Release everything and end the renewing thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for lease in self.held():
            self.release(lease)

    def __enter__(self) -> LeaseManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self, lease: Lease) -> None:
        with self._lock:
            self._held[lease.id] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_all, name="lease-renewal", daemon=True)
                self._thread.start()

    def _renew_all(self) -> None:
        while not self._closed.wait(self.renew_s):
            for lease in self.held():
                try:
                    renewed = self.registry.renew(lease.id, self.ttl_s)
                except Exception as error:  # the database is out of reach: that must not stop a training
                    logger.warning("lease %s %s was not renewed: %s", lease.kind, lease.resource, error)
                    continue
                with self._lock:
                    # Released in between: its row is meant to be gone.
                    if not renewed and lease.id in self._held:
                        lease.lost = True
                        logger.error("lease %s %s is gone from the registry", lease.kind, lease.resource)


def bind(host: str, port: int) -> socket.socket:
    """A bound, not listening socket that lets a server with SO_REUSEADDR bind beside it. OSError when anybody has the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as alone:
        # Without SO_REUSEADDR this fails beside any other socket on the port, a holder's of another registry included.
        alone.bind((host, port))
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held
