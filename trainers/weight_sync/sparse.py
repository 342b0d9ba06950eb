"""What changed in a bucket since the servers last acknowledged it, lossless (most bfloat16 weights do not move in a step).

The streams of a patch, and how a server applies them, are described in the server's plugin (`loopwright_vllm/sparse.py`):
gaps between changed words as bytes, places in a table of what is frequent, a checksum of the bucket it must become.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STREAMS = ("gaps", "table", "codes", "low", "rare")
SKIP, RARE = 255, 15
CHUNK_WORDS = 1 << 24
SAMPLE_WORDS = 1 << 16
MODULUS = 65521


@dataclass(frozen=True, slots=True)
class Patch:
    """gaps, codes uint8; table, rare int8, int16 or int32; below uint8 [changed, low]. `relative`: of differences."""

    gaps: torch.Tensor
    table: torch.Tensor
    codes: torch.Tensor
    below: torch.Tensor
    rare: torch.Tensor
    relative: bool
    low: int

    @property
    def streams(self) -> list[torch.Tensor]:
        """Each as bytes."""
        streams = (self.gaps, self.table, self.codes, self.below, self.rare)
        return [stream.reshape(-1).view(torch.uint8) for stream in streams]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each stream."""
        return [stream.numel() for stream in self.streams]


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
    after = new.view(dtype)[at]
    change = after - old.view(dtype)[at]
    sample = slice(None, None, at.numel() // SAMPLE_WORDS + 1)
    candidates = [_plan(words[sample], relative, low) for words, relative, low in (
        (change, True, 0), (change, True, width - 1), (after, False, width - 1)
    )]  # fmt: skip
    plan = min(candidates, key=lambda candidate: candidate.bytes_per_word)
    return Patch(_gaps(at), *_values(change if plan.relative else after, plan), plan.relative, plan.low)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How changed words are told. `bytes_per_word`: without positions, on a sample. `table`: high parts, frequent first."""

    bytes_per_word: float
    relative: bool
    low: int
    table: torch.Tensor


def _plan(sample: torch.Tensor, relative: bool, low: int) -> _Plan:
    high = _high(sample, low)
    parts, counts = high.unique(return_counts=True)
    most = counts.topk(min(RARE, counts.numel()))
    rare = high.numel() - int(most.values.sum())
    return _Plan(0.5 + low + rare / max(high.numel(), 1) * high.element_size(), relative, low, parts[most.indices])


def _high(words: torch.Tensor, low: int) -> torch.Tensor:
    return (words >> 8 * low).to(torch.int8) if low else words


def _values(words: torch.Tensor, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """table, codes, low, rare."""
    high = _high(words, plan.low)
    codes = torch.full_like(high, RARE, dtype=torch.uint8)
    for code, part in enumerate(plan.table):
        codes.masked_fill_(high == part, code)
    rare = high[codes == RARE]
    even, odd = codes[::2], codes[1::2]
    packed = even.clone()
    packed[: odd.numel()] |= odd << 4
    low = words.view(torch.uint8).view(-1, words.element_size())[:, : plan.low]  # both sides are little-endian
    return plan.table, packed, low.contiguous(), rare


def _gaps(at: torch.Tensor) -> torch.Tensor:
    unchanged = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    skips = unchanged // SKIP
    ends = (skips + 1).cumsum(0) - 1
    gaps = torch.full((int(ends[-1]) + 1 if at.numel() else 0,), SKIP, dtype=torch.uint8, device=at.device)
    gaps[ends] = (unchanged % SKIP).to(torch.uint8)
    return gaps
