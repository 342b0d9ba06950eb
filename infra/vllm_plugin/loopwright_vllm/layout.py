"""How named tensors lie in flat buckets of bytes. The trainer makes a layout once and names it by its id in every update.

    {"id": "…", "buckets": [bytes, …], "tensors": [[name, dtype, shape, bucket, offset in bytes], …]}

A tensor lies whole in one bucket, and offsets are multiples of its element size, so views need no copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    id: str
    buckets: tuple[int, ...]  # size of each in bytes
    entries: tuple[Entry, ...]

    @classmethod
    def parse(cls, data: dict) -> Layout:
        """ValueError unless every tensor lies inside its bucket and is known by one name."""
        entries = tuple(
            Entry(str(name), getattr(torch, str(dtype)), tuple(map(int, shape)), int(bucket), int(offset))
            for name, dtype, shape, bucket, offset in data["tensors"]
        )
        layout = cls(str(data["id"]), tuple(map(int, data["buckets"])), entries)
        if len({entry.name for entry in entries}) != len(entries):
            raise ValueError(f"layout {layout.id} names a tensor twice")
        for entry in entries:
            if not (0 <= entry.bucket < len(layout.buckets)) or entry.offset % entry.dtype.itemsize:
                raise ValueError(f"layout {layout.id}: {entry} is in no bucket or not aligned")
            if not 0 <= entry.offset <= layout.buckets[entry.bucket] - entry.nbytes:
                raise ValueError(f"layout {layout.id}: {entry} ends beyond its bucket")
        return layout

    @property
    def nbytes(self) -> int:
        return sum(self.buckets)

    def views(self, index: int, bucket: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named tensors in bucket `index`, given its bytes (uint8)."""
        if bucket.numel() != self.buckets[index]:
            raise ValueError(f"bucket {index} has {bucket.numel()} bytes, its layout says {self.buckets[index]}")
        return {
            entry.name: bucket[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
            for entry in self.entries
            if entry.bucket == index
        }
