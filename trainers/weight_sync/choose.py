"""Which way the weights go (`weight_sync=auto`), from what every worker says of itself, and whether a set way can work.

servers that take adapters, in a run that trains one          lora
servers of ours, every worker on a GPU of a trainer rank, loopback   ipc
servers of ours, no worker on rank 0's GPU, all on GPUs              nccl
servers of ours, on this machine (or a folder both see)              shared_storage
servers of ours, elsewhere                                           broadcasts over the network (`nccl` with gloo)
servers with vLLM's own "nccl" or "ipc" engine                       that, through vLLM's trainer-side classes
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from trainers.config import AsyncTrainerConfig
from trainers.errors import ServerCapabilityError
from trainers.server import BACKEND, ServerFacts
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.changes import Changes
from trainers.weight_sync.ipc import Ipc, check_same_gpus, gpu_uuid
from trainers.weight_sync.lora import Adapters, check_takes, choose_adapters
from trainers.weight_sync.members import Member
from trainers.weight_sync.shared_storage import SharedStorage
from trainers.weight_sync.stock import STOCK, Stock
from trainers.weight_sync.ways import Way

logger = logging.getLogger(__name__)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def machine() -> str:
    """The same for processes of one machine that can share memory and files; the server's workers say theirs."""
    try:
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return platform.node()


def choose(
    config: AsyncTrainerConfig, members: Sequence[Member], device: torch.device, world_size: int, uuids: Sequence[str | None]
) -> Way:
    """Args: uuids: of every rank's GPU.

    Raises:
        ServerCapabilityError: the servers cannot do what `weight_sync` says; the message has what to set or start instead.
    """
    way = _way(config, members, device, world_size, uuids)
    for member in members:
        check_member(config, way, member, uuids)
    return way


def check_member(config: AsyncTrainerConfig, way: Way, member: Member, uuids: Sequence[str | None]) -> None:
    """That `way` reaches a server: one of the first, or one that comes to the run later.

    Raises:
        ServerCapabilityError: it does not; the message has what to set or start instead.
    """
    if isinstance(way, Adapters):
        check_takes(config, member)
    elif isinstance(way, Ipc):
        check_same_gpus([member], uuids)
        if not _loopback(member):
            raise ServerCapabilityError(
                f"weight_sync=ipc shares GPU memory on loopback only, {member.client.url} is not: set nccl"
            )
    elif isinstance(way, Stock):
        if way.backend == "ipc" and not _loopback(member):
            raise ServerCapabilityError("vLLM's ipc engine unpickles what it is sent: loopback only; set its backend to nccl")
    elif (isinstance(way, Broadcast) or (isinstance(way, Changes) and way.broadcast is not None)) and not member.workers:
        raise ServerCapabilityError(
            f"broadcasts need to know the workers of {member.client.url}: start vLLM with --worker-extension-cls "
            "loopwright_vllm.worker.WorkerExtension (`loopwright serve MODEL` sets it), or set weight_sync=shared_storage"
        )


def check_like(member: Member, first: ServerFacts) -> None:
    """That a server which comes to a run later is like its first ones.

    Raises:
        ServerCapabilityError: it is not; the message has what to serve it with.
    """
    mine = member.facts
    assert mine is not None, f"{member.client.url} did not come"
    if mine.dtype != first.dtype:
        why = f"it computes in {mine.dtype}: serve it with --dtype {first.dtype}"
    elif mine.weight_backend != first.weight_backend:
        why = f"its weight transfer is {mine.weight_backend!r}, that of the run's servers is {first.weight_backend!r}"
    elif (mine.adapters is None) != (first.adapters is None):
        why = f"it was started with{'out' if mine.adapters is None else ''} --enable-lora, unlike the run's first servers"
    elif mine.max_model_len < first.max_model_len:
        why = f"it takes {mine.max_model_len} tokens: serve it with --max-model-len {first.max_model_len}"
    else:
        return
    raise ServerCapabilityError(why)


def _way(
    config: AsyncTrainerConfig, members: Sequence[Member], device: torch.device, world_size: int, uuids: Sequence[str | None]
) -> Way:
    if (adapters := choose_adapters(config, members)) is not None:
        return adapters
    backends = {member.facts.weight_backend for member in members if member.facts}
    if backends != {BACKEND}:
        return _stock(config, members, backends, device, world_size)
    name, why = config.weight_sync, "set by weight_sync"
    if name == "auto":
        name, why = _auto(members, device, uuids)
    logger.info("weights are sent by %s: %s", name, why)
    if name == "ipc":
        return Ipc(device, world_size)
    timeout_s = config.vllm_server_timeout
    if name == "nccl":
        return Broadcast(device, _group_backend(members, device), timeout_s)
    if name == "sparse":
        over_network = not all(_here(member) for member in members)
        return Changes(
            config.output_dir, Broadcast(device, _group_backend(members, device), timeout_s) if over_network else None
        )
    return SharedStorage(config.output_dir)


def _auto(members: Sequence[Member], device: torch.device, uuids: Sequence[str | None]) -> tuple[str, str]:
    workers = [worker for member in members for worker in member.workers]
    theirs = {worker["gpu_uuid"] for worker in workers}
    if device.type == "cuda" and workers and None not in theirs:
        if theirs <= set(uuids) and all(_loopback(member) for member in members):
            return "ipc", "servers and trainer share their GPUs"
        if gpu_uuid(device) not in theirs:
            return "nccl", "servers and trainer are on different GPUs"
    if workers and not all(_here(member) for member in members):
        return "nccl", "a server is on another machine"
    return "shared_storage", "servers and trainer are on one machine, and at least one of them has no GPU of its own"


def _group_backend(members: Sequence[Member], device: torch.device) -> str:
    """NCCL where every side has a GPU of its own, else gloo."""
    theirs = {worker["gpu_uuid"] for member in members for worker in member.workers}
    if device.type == "cuda" and None not in theirs and gpu_uuid(device) not in theirs:
        return "nccl"
    return "gloo"


def _here(member: Member) -> bool:
    """Whether it is on this machine; one that does not say is taken to be where its address says."""
    return all(worker["machine"] == machine() for worker in member.workers) if member.workers else _loopback(member)


def _loopback(member: Member) -> bool:
    return urlsplit(member.client.url).hostname in LOOPBACK


def _stock(
    config: AsyncTrainerConfig, members: Sequence[Member], backends: set[str | None], device: torch.device, world_size: int
) -> Way:
    """vLLM's own engine, for servers that somebody started with it."""
    backend = next(iter(backends)) if len(backends) == 1 else None
    if backend in STOCK and config.weight_sync in ("auto", backend) and device.type == "cuda":
        logger.info("weights are sent by vLLM's own %s engine: the servers were started with it", backend)
        return Stock(str(backend), device, world_size)
    first = members[0]
    found = first.facts.weight_backend if first.facts else None
    raise ServerCapabilityError(
        f"{first.client.url} was started with weight transfer {found!r}; weight_sync={config.weight_sync} needs the flag "
        f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\' (`loopwright serve MODEL` sets it)'
    )
