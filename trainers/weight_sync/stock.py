"""vLLM's own transfer engines, for servers that were started with `--weight-transfer-config '{"backend": "nccl"}'` (or "ipc").

    staged tensors ─▶ vLLM's trainer-side class ─▶ start ─▶ update ─▶ finish on every server, in one cycle of pause and resume

vLLM must be importable where the trainer runs. Its interface changed at 0.28: before, static methods of the server's engine
class; since, trainer classes made by a factory. Which one is there is seen from the module.
"""

from __future__ import annotations

import base64
import importlib
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from trainers.errors import ServerCapabilityError, ServerError
from trainers.weight_sync.broadcast import address_towards
from trainers.weight_sync.members import Member, each
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds, resume
from trainers.weight_sync.ways import Results

STOCK = ("nccl", "ipc")
PACKED_BYTES = 1 << 30


def vllm_module(name: str) -> Any:
    try:
        return importlib.import_module(f"vllm.distributed.weight_transfer.{name}")
    except ImportError as error:
        raise ServerCapabilityError(
            "the server uses vLLM's own weight transfer, whose other half is in vLLM: install vLLM where the trainer runs, or "
            f"start the server with `loopwright serve MODEL` ({error})"
        ) from error


class Servers:
    """What vLLM's trainer classes call a client: their four calls, to all the servers at once."""

    def __init__(self, members: Sequence[Member], ranks: dict[Member, int]) -> None:
        self.members, self.ranks = members, ranks
        self.version = 0

    def _each(self, work: Any) -> None:
        for result in each(self.members, work).values():
            if isinstance(result, ServerError):
                raise result

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each(
            lambda member: member.client.init_weight_transfer(
                init_info | ({"rank_offset": self.ranks[member]} if "rank_offset" in init_info else {})
            )
        )

    def start_weight_update(self) -> None:
        self._each(lambda member: member.client.start_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = dict(update_info)
        handles = info.pop("ipc_handles", None)
        info.pop("ipc_handles_pickled", None)
        if handles is not None:
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._each(lambda member: member.client.update(info))

    def finish_weight_update(self) -> None:
        self._each(lambda member: member.client.finish_update(self.version))


class Source:
    """What vLLM's trainer classes call a weight source: the staged tensors, as often as they ask."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def metadata(self) -> list[Any]:
        meta = vllm_module("base").ParamMeta
        return [meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


class Stock:
    """Way of vLLM's `backend`. Staged buckets must be on the GPU."""

    name: ClassVar[str] = "vllm"
    on_host: ClassVar[bool] = False
    every_rank: ClassVar[bool] = False

    def __init__(self, backend: str, device: torch.device, world_size: int) -> None:
        if backend == "ipc" and world_size > 1:
            raise ServerCapabilityError(
                "vLLM's ipc engine serves one trainer rank here: start the servers with `loopwright serve`"
            )
        self.backend, self.device = backend, device
        self.source = Source()
        self.sender: Any = None
        self.servers: Servers | None = None
        self.bytes_sent = 0

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """See `Way.send`."""
        layout = staging.layout
        assert layout is not None, "nothing is staged"
        self.source.tensors = {name: view.to(self.device) for name, view in layout.views(staging.buckets).items()}
        self.bytes_sent = layout.nbytes
        try:
            if self.servers is None or list(self.servers.members) != list(members):
                self._connect(members)
            assert self.servers is not None, "connected to nobody"
            self.servers.version = version
            return dict.fromkeys(members, self._cycle(members))
        except (ServerError, RuntimeError) as error:
            self.close()
            why = error if isinstance(error, ServerError) else ServerError(f"vLLM's {self.backend} engine: {error}")
            return dict.fromkeys(members, why)

    def close(self) -> None:
        if self.sender is not None and hasattr(self.sender, "shutdown"):
            self.sender.shutdown()
        self.sender, self.servers = None, None

    def _cycle(self, members: Sequence[Member]) -> Seconds:
        began = time.perf_counter()
        try:
            pauses = each(members, lambda member: member.client.pause())
            if failed := [error for error in pauses.values() if isinstance(error, ServerError)]:
                raise failed[0]
            paused = time.perf_counter()
            self._transfer()
            loaded = time.perf_counter()
        finally:
            resumes = each(members, lambda member: resume(member.client))
        if failed := [error for error in resumes.values() if isinstance(error, ServerError)]:
            raise failed[0]  # it is paused, or gone
        return Seconds(paused - began, loaded - paused)

    # Both generations of the interface ---------------------------------------------------------------------------------

    def _connect(self, members: Sequence[Member]) -> None:
        self.close()
        ranks, rank = {}, 1
        for member in members:
            ranks[member] = rank
            rank += member.client.world_size()
        self.servers = Servers(members, ranks)
        module = vllm_module(f"{self.backend}_engine")
        if hasattr(module, f"{self.backend.upper()}TrainerWeightTransferEngine"):
            factory = vllm_module("factory").WeightTransferTrainerFactory
            info = getattr(module, f"{self.backend.upper()}TrainerInitInfo")
            rendezvous = _rendezvous(members, rank) if self.backend == "nccl" else {}
            init = info(rank=0, packed=True, **rendezvous)
            self.sender = factory.trainer_init(init, client=self.servers, source=self.source)
        elif self.backend == "nccl":
            self.sender = self._older_group(members, rank)
        else:
            self.servers.init_weight_transfer_engine({})

    def _older_group(self, members: Sequence[Member], world_size: int) -> Any:
        assert self.servers is not None, "connected to nobody"
        rendezvous = _rendezvous(members, world_size)
        with ThreadPoolExecutor(1) as thread:
            theirs = thread.submit(self.servers.init_weight_transfer_engine, {**rendezvous, "rank_offset": 1})
            group = vllm_module("nccl_common").trainer_init(rendezvous)
            theirs.result()
        return group

    def _transfer(self) -> None:
        assert self.servers is not None, "connected to nobody"
        if hasattr(self.sender, "send_weights"):
            self.sender.send_weights()
            return
        module = vllm_module(f"{self.backend}_engine")
        self.servers.start_weight_update()
        if self.backend == "ipc":
            args = module.IPCTrainerSendWeightsArgs(
                send_mode=lambda info: self.servers and self.servers.update_weights(asdict(info)),
                packed=True,
                packed_buffer_size_bytes=PACKED_BYTES,
            )
            module.IPCWeightTransferEngine.trainer_send_weights(iter(self.source), args)
        else:
            names = list(self.source.tensors)
            info = {
                "names": names,
                "dtype_names": [str(self.source.tensors[name].dtype).removeprefix("torch.") for name in names],
                "shapes": [list(self.source.tensors[name].shape) for name in names],
                "packed": True,
                "packed_buffer_size_bytes": PACKED_BYTES,
                "packed_num_buffers": 2,
            }
            with ThreadPoolExecutor(1) as thread:
                theirs = thread.submit(self.servers.update_weights, info)
                args = module.NCCLTrainerSendWeightsArgs(
                    group=self.sender, packed=True, packed_buffer_size_bytes=PACKED_BYTES, packed_num_buffers=2
                )
                module.NCCLWeightTransferEngine.trainer_send_weights(iter(self.source), args)
                theirs.result()
        self.servers.finish_weight_update()


def _rendezvous(members: Sequence[Member], world_size: int) -> dict[str, Any]:
    host = address_towards(members[0].client.url)
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return {"master_address": host, "master_port": port, "world_size": world_size}
