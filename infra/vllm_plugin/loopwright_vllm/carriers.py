"""How the bytes of an update reach a worker. A carrier yields (bucket index, bytes on some device), each valid until the next.

file        a safetensors file that both sides can read
ipc         CUDA memory of the trainer, opened once, on the same GPU; handles travel as JSON, nothing is unpickled
broadcast   one process group of the trainer (rank 0) and every worker of every server: NCCL, or gloo on CPU
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

ALLOWED_ENV = "LOOPWRIGHT_WEIGHT_DIRS"
STORE_TIMEOUT_S = 30.0
# Far above any deadline of ours: torch's own watchdog would end the process.
GROUP_TIMEOUT = timedelta(days=7)


class Carrier(Protocol):
    persistent: bool  # whether every bucket of an update stays as it is until the update ends

    def receive(self, sizes: dict[int, int], timeout_s: float) -> Iterator[tuple[int, torch.Tensor]]: ...

    def close(self) -> None: ...


class WeightFolder:
    """Updates may be read from files in `directory`, which must lie inside LOOPWRIGHT_WEIGHT_DIRS where that is set."""

    def __init__(self) -> None:
        self.roots = [Path(root).resolve() for root in os.environ.get(ALLOWED_ENV, "").split(os.pathsep) if root]
        self.directory: Path | None = None

    def use(self, name: str) -> None:
        directory = Path(name).resolve()
        if not directory.is_dir():
            raise ValueError(f"weight directory {directory} does not exist on the server's machine")
        if self.roots and not any(directory.is_relative_to(root) for root in self.roots):
            raise ValueError(f"weight directory {directory} is outside {ALLOWED_ENV}={os.pathsep.join(map(str, self.roots))}")
        self.directory = directory

    def file(self, name: str, sha256: str | None) -> Path:
        """The resolved path. ValueError unless it is a .safetensors file inside an allowed directory, with that hash."""
        path = Path(name).resolve()
        allowed = [self.directory] if self.directory is not None else self.roots
        if not allowed:
            raise ValueError(
                'no weight directory is set: call /init_weight_transfer_engine {"init_info": {"directory": …}} first'
            )
        if not any(path.is_relative_to(root) for root in allowed):
            raise ValueError(f"{path} is outside the allowed weight directories {[str(root) for root in allowed]}")
        if path.suffix != ".safetensors" or not path.is_file():
            raise ValueError(f"{path} is not a .safetensors file")
        if sha256 is not None:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256.lower():
                raise ValueError(f"{path}: SHA-256 is {found}, the update says {sha256}")
        return path


class IpcCarrier:
    """`handles`: GPU UUID → one handle, as `torch.UntypedStorage._share_cuda_` gives it, bytes in base64. The trainer keeps the
    memory for as long as it may update this server. A call's buckets lie in it one after the other."""

    persistent = True

    def __init__(self, handles: dict[str, list[Any]], device: torch.device) -> None:
        uuid = gpu_uuid(device)
        if uuid not in handles:
            raise ValueError(
                f"no memory was shared on this worker's GPU {uuid}, only on {sorted(handles)}: use another transport"
            )
        fields = [base64.b64decode(field[4:]) if isinstance(field, str) else field for field in handles[uuid]]
        fields[0] = device.index
        storage = torch.UntypedStorage._new_shared_cuda(*fields)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def receive(self, sizes: dict[int, int], timeout_s: float) -> Iterator[tuple[int, torch.Tensor]]:
        start = 0
        for index, size in sizes.items():
            yield index, self.memory[start : start + size]
            start += (size + 255) // 256 * 256

    def close(self) -> None:
        del self.memory


class BroadcastCarrier:
    """Every bucket by one broadcast from rank 0, alternately into two buffers, so that one is received while one is loaded."""

    persistent = False

    def __init__(
        self, backend: str, host: str, port: int, token: str, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.backend, self.works = backend, []
        self.device = device if backend == "nccl" else torch.device("cpu")

        def join() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
            group = make_group(backend, dist.PrefixStore(token, store), rank, world_size, host)
            # The trainer's first broadcast makes the connections, which NCCL leaves to the first use.
            hello = torch.empty(4, dtype=torch.uint8, device=self.device)
            wait(group.broadcast([hello], from_trainer(backend, STORE_TIMEOUT_S)), time.monotonic() + STORE_TIMEOUT_S)
            return group

        self.group = within(
            STORE_TIMEOUT_S + 5.0,
            join,
            f"rank {rank} of {world_size} waited for the others of the {backend} weight group",
        )

    def receive(self, sizes: dict[int, int], timeout_s: float) -> Iterator[tuple[int, torch.Tensor]]:
        deadline = time.monotonic() + timeout_s
        largest = max(sizes.values(), default=0)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(min(2, len(sizes)))]
        order = list(sizes.items())
        waiting, limit_s = self.works, timeout_s
        waiting.clear()

        def begin(at: int) -> None:
            waiting.append(self.group.broadcast([buffers[at % 2][: order[at][1]]], from_trainer(self.backend, limit_s)))

        try:
            for at in range(min(2, len(order))):
                begin(at)
            for at, (index, size) in enumerate(order):
                wait(waiting[0], deadline)
                waiting.pop(0)
                yield index, buffers[at % 2][:size]
                # NCCL waits for the copies that were issued from this buffer; a CPU copy is done.
                if at + 2 < len(order):
                    begin(at + 2)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.group is not None:
            release(self.backend, self.group, list(self.works))
            self.group = None


def within(limit_s: float, work: Callable[[], Any], what: str) -> Any:
    """What `work` returns. NCCL makes its connections in a call without a time limit, which would hold up the worker for ever
    where another rank never comes; it is left behind in its thread then.

    Raises:
        TimeoutError: it did not return in time; the message is `what`.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight group", daemon=True).start()
    if not wait_for([future], limit_s).done:
        raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
    return future.result()


def make_group(backend: str, store: dist.Store, rank: int, world_size: int, host: str) -> Any:
    """A process group beside vLLM's own, which it does not know of."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=STORE_TIMEOUT_S)
    # The interface that reaches the trainer; the name of this machine may resolve to another one, or to none.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    group = dist.ProcessGroupGloo(store, rank, world_size, options)
    group._set_default_timeout(GROUP_TIMEOUT)
    return group


def from_trainer(backend: str, timeout_s: float) -> dist.BroadcastOptions:
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


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`."""
    import socket

    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def wait(work: Any, deadline: float) -> None:
    """Until `work` has ended; TimeoutError at the deadline. Polls: a collective whose peer died may never return."""
    pause = 20e-6
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError("the trainer's broadcast did not end in time: it, or another server, is gone")
        time.sleep(pause)
        pause = min(pause * 1.5, 2e-3)
    work.wait()  # raises what went wrong, and orders the stream


def gpu_uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
