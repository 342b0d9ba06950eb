"""What changed in a bucket since the servers last acknowledged it, lossless (most bfloat16 weights do not move in a step).

The streams of a patch, and how a server applies them, are described in the server's plugin (`loopwright_vllm/sparse.py`):
gaps between changed words as bytes, differences as bytes with a way out for wide ones, a checksum of the bucket it must become.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SKIP, ESCAPE = 255, -128
CHUNK_WORDS = 1 << 24
MODULUS = 65521


@dataclass(frozen=True, slots=True)
class Patch:
    """gaps uint8, small int8 [changed], wide int16 or int32."""

    gaps: torch.Tensor
    small: torch.Tensor
    wide: torch.Tensor

    @property
    def streams(self) -> list[torch.Tensor]:
        return [self.gaps, self.small, self.wide]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each stream."""
        return [stream.numel() * stream.element_size() for stream in self.streams]


def checksum(bucket: torch.Tensor) -> int:
    """Of bytes (uint8, a multiple of 4): sums of their 32-bit words, plain and weighted by position, both wrapping."""
    words = bucket.view(torch.int32)
    plain = torch.zeros((), dtype=torch.int64, device=bucket.device)
    weighted = torch.zeros_like(plain)
    for start in range(0, words.numel(), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=bucket.device) % MODULUS + 1
        plain += part.sum()
        weighted += (part * position).sum()
    return int((plain * 1_000_003 + weighted).item())


def changed_words(old: torch.Tensor, new: torch.Tensor, width: int) -> torch.Tensor:
    """int64: positions of the words of `width` bytes (2 or 4) in which two buckets differ."""
    dtype = torch.int16 if width == 2 else torch.int32
    return (old.view(dtype) != new.view(dtype)).nonzero()[:, 0]


def encode(old: torch.Tensor, new: torch.Tensor, width: int, at: torch.Tensor) -> Patch:
    """The patch that turns `old` into `new`, which differ at `at` (see `changed_words`)."""
    dtype = torch.int16 if width == 2 else torch.int32
    unchanged = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    skips = unchanged // SKIP
    ends = (skips + 1).cumsum(0) - 1
    gaps = torch.full((int(ends[-1]) + 1 if at.numel() else 0,), SKIP, dtype=torch.uint8, device=at.device)
    gaps[ends] = (unchanged % SKIP).to(torch.uint8)
    change = new.view(dtype)[at] - old.view(dtype)[at]
    fits = (change > ESCAPE) & (change < 128)
    small = torch.where(fits, change, ESCAPE).to(torch.int8)
    return Patch(gaps, small, change[~fits])
