"""Records which bytes of an update went where while vLLM loaded it, so that later updates are one fused copy.

    first update:   Recorder watches every operation of vLLM's own load ─▶ Plan, or the reason why there is none
    later updates:  plan.apply({name: tensor}) ─▶ torch._foreach_copy_

vLLM's loaders split, fuse and take this rank's shard tensor by tensor in Python; the copies they end in are always the same.
A plan is made only when the record proves that replaying the copies is the whole effect of a load:
- every operation that read an update's data, or a copy of it, was a view or a plain copy: nothing was repacked or derived;
- every element of every parameter was written exactly once, by a tensor of the update or by a constant (padding).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
CONSTANTS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset in elements


@dataclass(frozen=True)
class Piece:
    """A region of a storage and the region of a named tensor that was copied there; `name` None: a constant."""

    region: Geometry
    name: str | None
    source: Geometry | None


@dataclass
class Written:
    """What a storage holds. `sources`: named tensors that lie in it, as (first element, elements, name)."""

    reference: StorageWeakRef  # keeps the storage's address from being used again
    pieces: list[Piece] = field(default_factory=list)
    sources: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def holds_weights(self) -> bool:
        return bool(self.sources) or any(piece.name is not None for piece in self.pieces)


def geometry(tensor: torch.Tensor) -> Geometry:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


class Recorder(TorchDispatchMode):
    """Use as a context around a load whose tensors were announced by `announce`."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Written] = {}
        self.names: set[str] = set()
        self.problem: str | None = None

    def announce(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` (contiguous) is the update's `name`."""
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        self.names.add(name)
        self._written(tensor).sources.append((tensor.storage_offset(), tensor.numel(), name))

    def plan(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Plan | None:
        """None, with the reason in `problem`, unless the record proves that copies are all that a load does."""
        targets: dict[int, torch.Tensor] = {}
        for name, parameter in parameters:
            if self.problem is not None:
                return None
            key = parameter.untyped_storage()._cdata
            if key in targets:
                continue  # tied
            targets[key] = parameter.data
            written = self.known.get(key)
            self.problem = uncovered(name, parameter, written.pieces if written is not None else [])
        if self.problem is not None:
            return None
        moves: dict[str, list[Move]] = {name: [] for name in self.names}
        for key, tensor in targets.items():
            for piece in self.known[key].pieces:
                if piece.name is not None and piece.source is not None:
                    moves[piece.name].append((tensor.as_strided(*piece.region), *piece.source))
        return Plan(moves, [(tensor, tensor.data_ptr()) for tensor in targets.values()])

    # Watching --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.problem is None:
            self._note(func, args, kwargs or {})
        return out

    def _note(self, func: Any, args: tuple, kwargs: dict) -> None:
        if func is aten.copy_.default:
            if not args[0].is_meta:  # vLLM counts elements by a dry run on the meta device
                self._copied(args[0], args[1])
            return
        if func in CONSTANTS:
            if not args[0].is_meta:
                self._written(args[0]).pieces.append(Piece(geometry(args[0]), None, None))
            return
        returns = func._schema.returns
        if not func._schema.is_mutable and returns and all(r.alias_info is not None for r in returns):
            return  # a view
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                written = self.known.get(leaf.untyped_storage()._cdata)
                if written is not None and written.holds_weights:
                    self.problem = f"{func} works on weights that were just loaded"
                    return

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        origin = self.known.get(source.untyped_storage()._cdata)
        if origin is None or not origin.holds_weights:
            written = self.known.get(target.untyped_storage()._cdata)
            if written is not None:
                written.pieces.append(Piece(geometry(target), None, None))
            return
        if target.shape != source.shape:
            self.problem = f"a copy of {tuple(source.shape)} into {tuple(target.shape)}"
            return
        pieces = self._written(target).pieces
        size, stride, start = geometry(source)
        for first, count, name in origin.sources:
            if first <= start < first + count or (count == 0 and start == first):
                pieces.append(Piece(geometry(target), name, (size, stride, start - first)))
                return
        # From an intermediate copy: its pieces lie in the target as they lay there, if both have one layout.
        whole = source.numel() * source.element_size() == source.untyped_storage().nbytes()
        if not (whole and start == 0 and target.stride() == stride and target.dtype == source.dtype):
            self.problem = f"part of an intermediate copy was copied on ({tuple(source.shape)})"
            return
        shift = target.storage_offset()
        for piece in origin.pieces:
            region_size, region_stride, offset = piece.region
            pieces.append(Piece((region_size, region_stride, offset + shift), piece.name, piece.source))

    def _written(self, tensor: torch.Tensor) -> Written:
        storage = tensor.untyped_storage()
        written = self.known.get(storage._cdata)
        if written is None:
            written = self.known[storage._cdata] = Written(StorageWeakRef(storage))
        return written


def uncovered(name: str, parameter: torch.Tensor, pieces: list[Piece]) -> str | None:
    """Why `pieces` do not write every element of the parameter exactly once; None if they do."""
    storage = parameter.untyped_storage()
    count = torch.zeros(storage.nbytes() // parameter.element_size(), dtype=torch.int16, device=parameter.device)
    for piece in pieces:
        count.as_strided(*piece.region).add_(1)
    mine = count.as_strided(*geometry(parameter))
    if mine.numel() and not bool((mine == 1).all()):
        return f"{name}: an element was written {int(mine.min())} to {int(mine.max())} times"
    return None


Move = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]  # target; size, stride, offset in the named tensor


class Plan:
    """`moves`: for each tensor of an update, its copies; none for one that vLLM does not load (a tied head)."""

    def __init__(self, moves: dict[str, list[Move]], pointers: list[tuple[torch.Tensor, int]]) -> None:
        self.moves, self.pointers = moves, pointers

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the model's parameters still lie where they lay."""
        return {parameter.data_ptr() for parameter in parameters} == {pointer for _, pointer in self.pointers}

    def apply(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies contiguous named tensors into the parameters. KeyError for a name that the record has not seen."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            for target, size, stride, offset in self.moves[name]:
                targets.append(target)
                sources.append(tensor.as_strided(size, stride, tensor.storage_offset() + offset))
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
