"""Ulysses (arXiv:2309.14509): attention over a row whose tokens are spread over P ranks, by all-to-all over heads.

    [T/P, Hq, D] ─all-to-all─▶ [T, Hq/P, D] ─▶ any attention over whole sequences ─▶ [T, Hq/P, D] ─all-to-all─▶ [T/P, Hq, D]

Every rank sees the whole row with a part of the heads, so packing and every backend work as they do on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainers.sequence_parallel import Axis

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_over_heads(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Axis) -> torch.Tensor:
    """`attend` on whole rows with a share of the heads. q [T/P, Hq, D], k and v [T/P, Hk, D] → [T/P, Hq, D].

    P divides Hq. Where it does not divide Hk, key and value heads are repeated until it does.
    """
    assert q.shape[1] % ranks.size == 0, f"{q.shape[1]} query heads over {ranks.size} ranks"
    repeats = math.lcm(k.shape[1], ranks.size) // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    out = attend(*(_Exchange.apply(x, ranks, True) for x in (q, k, v)))
    return _Exchange.apply(out, ranks, False)


class _Exchange(torch.autograd.Function):
    """Tokens of all heads to heads of all tokens, or back; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Axis, to_heads: bool) -> torch.Tensor:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _heads_of_all_tokens(x, ranks) if to_heads else _tokens_of_all_heads(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _tokens_of_all_heads if ctx.to_heads else _heads_of_all_tokens
        return back(grads[0], ctx.ranks), None, None


def _heads_of_all_tokens(x: torch.Tensor, ranks: Axis) -> torch.Tensor:
    """[t, P·h, D] → [P·t, h, D]."""
    tokens, heads, width = x.shape
    sent = x.view(tokens, ranks.size, heads // ranks.size, width).transpose(0, 1).contiguous()
    return _all_to_all(sent, ranks).view(ranks.size * tokens, heads // ranks.size, width)


def _tokens_of_all_heads(x: torch.Tensor, ranks: Axis) -> torch.Tensor:
    """[P·t, h, D] → [t, P·h, D]."""
    tokens, heads, width = x.shape
    came = _all_to_all(x.contiguous().view(ranks.size, tokens // ranks.size, heads, width), ranks)
    return came.transpose(0, 1).reshape(tokens // ranks.size, ranks.size * heads, width)


def _all_to_all(sent: torch.Tensor, ranks: Axis) -> torch.Tensor:
    """Element i of [P, …] goes to rank i; element i of what comes is from it."""
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=ranks.group)
    return came
