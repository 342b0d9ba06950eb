"""Weights to servers on the same GPU: they open the trainer's buckets once and copy from them at every sync.

    staged buckets (GPU memory) ─ handle, once ─▶ server ─ update ─▶ one fused copy into the parameters

Handles go as JSON fields, nothing is pickled. A handle gives access to the trainer's memory: loopback servers only.
Where the buckets do not fit on the GPU beside the model, they stay on the host and pass through a window, several calls a sync.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from trainers.errors import ServerCapabilityError
from trainers.weight_sync.layout import Layout
from trainers.weight_sync.members import Member, each
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.ways import Results, connect, introduce, update_member

WINDOW_BYTES = 1 << 30


def handle_of(memory: torch.Tensor) -> list[Any]:
    """One consumer's access to a CUDA tensor's storage. Hand out a new one per server: the storage counts its users."""
    fields = memory.untyped_storage()._share_cuda_()
    return ["b64:" + base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


def gpu_uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


class Ipc:
    """Way `ipc`. Rank 0's own buckets, and where other ranks hold the same on their GPUs, theirs (`offers`)."""

    name: ClassVar[str] = "ipc"
    on_host: ClassVar[bool] = False
    every_rank: ClassVar[bool] = True

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.device, self.world_size = device, world_size
        self.window: torch.Tensor | None = None
        self.offers: list[dict[str, list[Any]]] = []  # other ranks' handles, one per server to connect
        self.bytes_sent = 0

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """See `Way.send`."""
        layout = staging.layout
        assert layout is not None, "nothing is staged"
        self.bytes_sent = layout.nbytes
        if staging.device.type == "cuda":
            return each(members, lambda member: self._one(member, layout, [dict], version, staging.memory))
        if self.world_size > 1:
            raise ServerCapabilityError(
                f"the policy's {layout.nbytes / 1e9:.1f} GB of buckets do not fit on the GPU beside the model, and only one "
                "rank can send through a window: set weight_sync=shared_storage"
            )
        window = self.window
        if window is None or window.numel() < max(layout.buckets):
            window = self.window = torch.empty(max(WINDOW_BYTES, *layout.buckets), dtype=torch.uint8, device=self.device)
        rounds = [self._round(window, staging, part, last) for part, last in _parts(layout, window.numel())]
        results: Results = {}
        for member in members:  # one after the other: they read the same window
            results |= each([member], lambda member: self._one(member, layout, rounds, version, window))
        return results

    def close(self) -> None:
        self.window = None

    def _one(
        self, member: Member, layout: Layout, rounds: list[Callable[[], dict]], version: int, memory: torch.Tensor
    ) -> Seconds:
        channel = f"ipc {memory.data_ptr()}"
        if member.channel != channel:
            handles = {str(gpu_uuid(self.device)): handle_of(memory)} | (self.offers.pop() if self.offers else {})
            connect(member, channel, {"transport": "ipc", "handles": handles})
        introduce(member, layout)
        return update_member(member, {"layout": layout.id}, version, rounds)

    def _round(self, window: torch.Tensor, staging: Staging, part: list[int], last: bool) -> Callable[[], dict]:
        def bring() -> dict[str, Any]:
            start = 0
            for index in part:
                bucket = staging.buckets[index]
                window[start : start + bucket.numel()].copy_(bucket, non_blocking=True)
                start += bucket.numel()
            torch.cuda.current_stream(self.device).synchronize()
            return {"buckets": part, "last": last}

        return bring


def _parts(layout: Layout, room: int) -> list[tuple[list[int], bool]]:
    """Bucket indices that fit into `room` bytes together, and whether they are the last."""
    parts: list[list[int]] = [[]]
    left = room
    for index, size in enumerate(layout.buckets):
        if size > left:
            parts.append([])
            left = room
        parts[-1].append(index)
        left -= size
    return [(part, at == len(parts) - 1) for at, part in enumerate(parts)]


def check_same_gpus(members: Sequence[Member], uuids: Sequence[str | None]) -> None:
    """Raises `ServerCapabilityError` unless every worker runs on a GPU that a rank of the trainer runs on too."""
    for member in members:
        theirs = {worker["gpu_uuid"] for worker in member.workers}
        if not theirs or None in theirs or not theirs <= set(uuids):
            raise ServerCapabilityError(
                f"weight_sync=ipc needs servers on the trainer's GPUs {sorted(map(str, uuids))}; {member.client.url} runs on "
                f"{sorted(map(str, theirs))}: set weight_sync=nccl or shared_storage"
            )
