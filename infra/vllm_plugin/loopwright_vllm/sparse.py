"""Updates that carry only what changed, lossless: the worker keeps a mirror of the last update and patches it.

A bucket's words are its elements as integers (16 or 32 bits). Its patch is five streams of bytes. A changed word is told as its
difference to the old one (they wrap) or as itself, whichever is shorter, and cut into a high part, of which few are frequent,
and `low` bytes below it:

    gaps   uint8          unchanged words before each changed one; 255 stands for 255 unchanged words and none that changed
    table  int            the most frequent high parts, at most 15
    codes  4 bits each    place in the table, the first word in the lower half of a byte; 15: not in it
    low    uint8 [, low]  the bytes below the high parts, lowest first
    rare   int            high parts that are not in the table, in order

High parts are signed integers of the word's size, of 8 bits where `low` bytes are cut off. A patched bucket must have the
trainer's checksum before anything is loaded from it.
"""

from __future__ import annotations

import torch

STREAMS = ("gaps", "table", "codes", "low", "rare")
SKIP, RARE = 255, 15
CHUNK_WORDS = 1 << 24
MODULUS = 65521


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


def word_type(width: int) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[width]


def patch(bucket: torch.Tensor, width: int, relative: bool, low: int, streams: list[torch.Tensor]) -> None:
    """Apply a bucket's five streams (uint8) in place. `relative`: they tell differences; `low`: bytes below a high part, 0 or
    `width` - 1. ValueError when the streams do not fit together."""
    if low not in (0, width - 1):
        raise ValueError(f"a patch of {width}-byte words cannot have {low} low bytes")
    gaps, table, codes, below, rare = streams
    words = bucket.view(word_type(width))
    steps = torch.where(gaps == SKIP, SKIP, gaps.to(torch.int64) + 1)
    at = (steps.cumsum(0) - 1)[gaps != SKIP]
    count = at.numel()
    if codes.numel() != (count + 1) // 2 or below.numel() != count * low or (count and int(at[-1]) >= words.numel()):
        raise ValueError(
            f"a patch of {count} positions, {codes.numel()} bytes of codes and {below.numel()} of low parts does not fit "
            f"{words.numel()} words"
        )
    kind = torch.int8 if low else words.dtype
    codes = torch.stack([codes & RARE, codes >> 4], 1).flatten()[:count].to(torch.int64)
    frequent, others = table.clone().view(kind), rare.clone().view(kind)  # copied, because in a file they lie anywhere
    escaped = codes == RARE
    announced = int(escaped.sum())
    if announced != others.numel():
        raise ValueError(f"a patch announces {announced} rare values and has {others.numel()}")
    if count > announced and int(codes[~escaped].max()) >= frequent.numel():
        raise ValueError(f"a patch names a value beyond its table of {frequent.numel()}")
    lookup = torch.zeros(RARE + 1, dtype=kind, device=bucket.device)
    lookup[: frequent.numel()] = frequent
    values = lookup[codes]
    values[escaped] = others
    if low:
        values = values.to(words.dtype) << 8 * low
        for place, byte in enumerate(below.view(count, low).unbind(1)):
            values |= byte.to(words.dtype) << 8 * place
    words[at] = words[at] + values if relative else values
