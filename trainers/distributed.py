"""Ranks: process groups, the device mesh, sharding, and the small collectives the loop needs.

    torchrun ─▶ init_distributed ─▶ Ranks ─▶ shard(model) ─▶ DTensor parameters, over all ranks
                                     ├─▶ sequence: the ranks of dp × cp × sp that share this one's rows
                                     └─▶ rank_zero(fn): runs on rank 0, every rank gets the result or the error

Two groups: the default one carries tensors (NCCL on GPUs, gloo on CPU), `control` is always gloo and carries Python objects.
What only rank 0 does (HTTP, the rollout process, files) goes through `rank_zero`: its failure is everyone's failure and no
rank is left waiting in a collective.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainers import errors
from trainers.packing import unshared_ranks
from trainers.sequence_parallel import Axis, SequenceParallel

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Ranks:
    """This process's place among the trainer ranks. `control` is None without a process group (one CPU process)."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    control: dist.ProcessGroup | None
    local_world_size: int = 1
    sequence: SequenceParallel | None = None  # the ranks that share this one's rows; None: nobody does

    @property
    def place_size(self) -> int:
        """Ranks that are given the same rows."""
        return self.sequence.size if self.sequence is not None else 1

    @property
    def dp_size(self) -> int:
        """Rows of a micro-batch."""
        return self.world_size // self.place_size

    @property
    def dp_rank(self) -> int:
        """Which of them is this rank's, whole or in part."""
        return self.rank // self.place_size

    @property
    def leads(self) -> bool:
        """Whether this rank counts what all know that share its rows."""
        return self.sequence is None or self.sequence.leads

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def one_node(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.local_world_size == self.world_size

    def rank_zero(self, fn: Callable[[], T]) -> T:
        """Run `fn` on rank 0 and hand its result to every rank.

        Raises:
            Exception: on rank 0, what `fn` raised; on the others a `LoopwrightError` of the same kind and text.
        """
        if self.world_size == 1:
            return fn()
        box: list[Any] = [None, None, None]
        failure: BaseException | None = None
        if self.is_main:
            try:
                box = ["ok", fn(), None]
            except Exception as error:
                failure, box = error, ["error", type(error).__name__, str(error)]
        dist.broadcast_object_list(box, src=0, group=self.control)
        if failure is not None:
            raise failure
        if box[0] == "error":
            kind = getattr(errors, box[1], errors.LoopwrightError)
            raise kind(f"rank 0: {box[2]}")
        return box[1]

    def scatter(self, parts: list[Any] | None) -> Any:
        """Element `rank` of rank 0's list."""
        if self.world_size == 1:
            assert parts is not None and len(parts) == 1, f"one rank, {parts and len(parts)} parts"
            return parts[0]
        out: list[Any] = [None]
        dist.scatter_object_list(out, parts if self.is_main else None, src=0, group=self.control)
        return out[0]

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error: its own where it has one, else the first other's."""
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        seen: list[Any] = [None] * self.world_size
        mine = None if error is None else (type(error).__name__, str(error))
        dist.all_gather_object(seen, mine, group=self.control)
        if error is not None:
            raise error
        for rank, other in enumerate(seen):
            if other is not None:
                raise getattr(errors, other[0], errors.LoopwrightError)(f"rank {rank}: {other[1]}")

    def any(self, *flags: bool) -> list[bool]:
        """Per flag, whether it is set on any rank."""
        if self.world_size == 1:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control)
        return [bool(value) for value in values.tolist()]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.control)


def init_distributed(timeout_s: float = 3600.0, *, needs_mesh: bool = False, cp_size: int = 1, sp_size: int = 1) -> Ranks:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK), or be the only one.

    Args:
        timeout_s: how long a rank waits for another in a collective; above the longest wait of rank 0 for a server or rollout.
        needs_mesh: make a mesh of size 1 for a single process too (mixed precision is FSDP's).
        cp_size, sp_size: ranks that share a row, by ring attention and by heads.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if (wrong := unshared_ranks(world, cp_size, sp_size)) is not None:
        raise errors.ConfigError(wrong)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world == 1 and not needs_mesh:
        return Ranks(0, 1, local_rank, device, None, None)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        alone = {"store": HashStore(), "rank": 0, "world_size": 1} if world == 1 and "RANK" not in os.environ else {}
        dist.init_process_group(backend, timeout=timeout, device_id=device if cuda else None, **alone)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup), "every rank is a member"
    sequence = share_rows(device, world, cp_size, sp_size) if cp_size * sp_size > 1 else None
    return Ranks(rank, world, local_rank, device, mesh, control, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), sequence)


def share_rows(device: torch.device, world: int, cp_size: int, sp_size: int) -> SequenceParallel:
    """This rank among those that share its rows: neighbours by `sp`, whose exchanges no computation hides, then by `cp`."""
    mesh = init_device_mesh(device.type, (world // (cp_size * sp_size), cp_size, sp_size), mesh_dim_names=("dp", "cp", "sp"))

    def axis(name: str, size: int) -> Axis:
        return Axis(size, mesh.get_local_rank(name), mesh.get_group(name)) if size > 1 else Axis()

    return SequenceParallel(axis("cp", cp_size), axis("sp", sp_size))


def shutdown_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(root: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, *, compute_dtype: torch.dtype | None) -> None:
    """FSDP2: shard each layer and the rest of `root` over the mesh. Gradients are summed over ranks, never averaged: losses are
    already divided by whole-step counts.

    Args:
        compute_dtype: forward and backward run in this type, reductions in float32; None: parameters' own type.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The root holds embedding, final norm and head; it stays gathered between forward and backward, as the head's backward
    # needs the weight again at once.
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective for a DTensor)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
