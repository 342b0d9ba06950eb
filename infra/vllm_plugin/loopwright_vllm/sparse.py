"""Updates that carry only what changed, lossless: the worker keeps a mirror of the last update and patches it.

A bucket's words are its elements as integers (16 or 32 bits). Its patch is three streams of bytes:

    gaps   uint8          unchanged words before each changed one; 255 stands for 255 unchanged words and none that changed
    small  int8           new − old of each changed word, as integers that wrap; −128 announces a wide one
    wide   int16 / int32  the differences that do not fit, in order

A patched bucket must have the trainer's checksum before anything is loaded from it.
"""

from __future__ import annotations

import torch

SKIP, ESCAPE = 255, -128
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


def patch(bucket: torch.Tensor, width: int, gaps: torch.Tensor, small: torch.Tensor, wide: torch.Tensor) -> None:
    """Apply a bucket's three streams in place. ValueError when they do not fit together."""
    words = bucket.view(word_type(width))
    steps = torch.where(gaps == SKIP, SKIP, gaps.to(torch.int64) + 1)
    at = (steps.cumsum(0) - 1)[gaps != SKIP]
    if at.numel() != small.numel() or (at.numel() and int(at[-1]) >= words.numel()):
        raise ValueError(f"a patch of {at.numel()} positions and {small.numel()} values does not fit {words.numel()} words")
    change = small.to(words.dtype)
    escaped = small == ESCAPE
    if int(escaped.sum()) != wide.numel():
        raise ValueError(f"a patch announces {int(escaped.sum())} wide values and has {wide.numel()}")
    change[escaped] = wide
    words[at] = words[at] + change
