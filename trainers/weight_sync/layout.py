"""How the parameters of a policy lie in flat buckets of bytes, under the names and in the type that the server loads.

    model ─▶ blocks (a layer, or what stands around the layers) ─▶ exported names and shapes ─▶ buckets

A block's tensors lie together and in the model's order, so a server that loads bucket after bucket finishes layer after layer.
Buckets are few and large: every one of them costs a fixed time on its way.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from trainers.lora import Served, served_parameters
from trainers.model import export_state
from trainers.text_part import outside_text

BUCKET_BYTES = 256 << 20
ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the server knows it; `offset` in bytes from the start of its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """`blocks`: the parameters' names in memory, block by block, in the order every rank gathers them.

    `buckets`: size of each in bytes, a multiple of `ALIGN_BYTES`. `partial`: blocks that are never trained are left out.
    """

    blocks: tuple[tuple[str, ...], ...]
    entries: tuple[Entry, ...]
    buckets: tuple[int, ...]
    partial: bool
    renamed: bool  # whether exporting changes anything

    @property
    def nbytes(self) -> int:
        return sum(self.buckets)

    @cached_property
    def wire(self) -> dict[str, Any]:
        """As the server is told, once."""
        tensors = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape), e.bucket, e.offset] for e in self.entries]
        text = json.dumps([self.buckets, tensors, self.partial])
        return {"id": hashlib.sha256(text.encode()).hexdigest()[:16], "buckets": list(self.buckets), "tensors": tensors}

    @property
    def id(self) -> str:
        return self.wire["id"]

    def views(self, buckets: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The named tensors in all the buckets (uint8)."""
        return {e.name: buckets[e.bucket][e.offset : e.offset + e.nbytes].view(e.dtype).view(e.shape) for e in self.entries}


def block_of(name: str) -> str:
    """What is sent or left out as a whole: everything up to the first number (a layer), else the first two parts of the name.

    The server fuses tensors of a block, so a part of one is nothing it could load.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:2])


def make_layout(model: PreTrainedModel, dtype: torch.dtype, *, everything: bool, bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """Args: dtype: of floating-point tensors on the wire. everything: also blocks no parameter of which is trained, but for
    those that text does not go through: the server has loaded them itself, and they never change."""
    parameters = served_parameters(model)
    foreign = outside_text(model)
    blocks: dict[str, list[str]] = {}
    for name in parameters:
        blocks.setdefault(block_of(name), []).append(name)
    sent = {key: names for key, names in blocks.items() if not foreign.issuperset(names)}
    trained = {key for key, names in sent.items() if everything or any(parameters[name].trained for name in names)}
    kept = [tuple(names) for key, names in blocks.items() if key in trained]
    entries: list[Entry] = []
    sizes: list[int] = []
    renamed = False
    for names in kept:
        shapes = {
            name: torch.empty(parameters[name].shape, dtype=wire_dtype(parameters[name], dtype), device="meta")
            for name in names
        }
        exported = export_state(model, dict(shapes))
        renamed = renamed or list(exported) != list(shapes)
        for name, tensor in exported.items():
            nbytes = math.ceil(tensor.numel() * tensor.element_size() / ALIGN_BYTES) * ALIGN_BYTES
            if not sizes or sizes[-1] + nbytes > bucket_bytes:
                sizes.append(0)
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1]))
            sizes[-1] += nbytes
    return Layout(tuple(kept), tuple(entries), tuple(sizes), len(kept) < len(blocks), renamed)


def wire_dtype(parameter: Served, dtype: torch.dtype) -> torch.dtype:
    return dtype if parameter.dtype.is_floating_point else parameter.dtype


def gathered_blocks(
    model: PreTrainedModel, layout: Layout, dtype: torch.dtype, keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Block by block, whole tensors under the server's names on the parameters' device: a collective when sharded.

    `keep`: False on ranks that only take part in the gather; they get empty blocks.
    """
    parameters = served_parameters(model)
    for names in layout.blocks:
        whole = {name: parameters[name].whole(wire_dtype(parameters[name], dtype)) for name in names}
        yield (export_state(model, whole) if layout.renamed else whole) if keep else {}
