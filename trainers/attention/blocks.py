"""A block of ring attention: some queries over some keys with the log-sum-exp, and its backward from those of all keys.

A block's forward is (q [t, Hq, D], k and v [s, Hk, D], scale, causal) → (out [t, Hq, D], lse [Hq, t]); its backward is
(d_out, q, k, v, out, lse, scale, causal) → (d_q, d_k, d_v), where `out` and `lse` are those over all keys, not this block's:
p = exp(score − lse) is then every pair's final probability. Causal blocks have as many keys as queries. `lse` is in float32, or
float64 for float64. `REFERENCE` is exact on any device and type and is the oracle of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from trainers.attention.backends import DENSE_TOKENS

aten = torch.ops.aten
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SCORES = 1 << 26  # of `REFERENCE`, held at a time


class Blocks(NamedTuple):
    name: str
    forward: Forward
    backward: Callable[..., Gradients]


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, first: int) -> torch.Tensor:
    """[Hk, Hq/Hk, n, s] of n queries, the first of which is number `first`."""
    grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    if causal:
        numbers = torch.arange(first, first + len(q), device=q.device)
        scores.masked_fill_(torch.arange(len(k), device=q.device) > numbers[:, None], float("-inf"))
    return scores


def _parts(q: torch.Tensor, k: torch.Tensor) -> range:
    """Where the parts of the queries begin, each of which has at most `SCORES` scores."""
    return range(0, len(q), max(1, SCORES // (q.shape[1] * len(k))))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = [], []
    dtype, (q, k, v) = q.dtype, map(_wide, (q, k, v))
    parts = _parts(q, k)
    for first in parts:
        part = q[first : first + parts.step]
        scores = _scores(part, k, scale, causal, first)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp_()
        outs.append(torch.einsum("hgqk,khd->qhgd", weights, v).reshape(part.shape))
        lses.append(lse.flatten(0, 1))
    return torch.cat(outs).to(dtype), torch.cat(lses, 1)


def _reference_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    dtype, (d_out, q, k, v, out) = q.dtype, map(_wide, (d_out, q, k, v, out))
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    shape = (k.shape[1], q.shape[1] // k.shape[1])
    parts = _parts(q, k)
    for first in parts:
        rows = slice(first, first + parts.step)
        weights = (_scores(q[rows], k, scale, causal, first) - lse[:, rows].unflatten(0, shape)[..., None]).exp_()
        slopes, queries = (x[rows].unflatten(1, shape) for x in (d_out, q))
        d_v += torch.einsum("hgqk,qhgd->khd", weights, slopes)
        # d score = p (d p − Σ p d p), and Σ p d p over all keys is out · d_out.
        mean = (d_out[rows] * out[rows]).sum(-1).T.unflatten(0, shape)[..., None]
        d_scores = (torch.einsum("qhgd,khd->hgqk", slopes, v) - mean).mul_(weights).mul_(scale)
        d_q[rows] = torch.einsum("hgqk,khd->qhgd", d_scores, k).flatten(1, 2)
        d_k += torch.einsum("hgqk,qhgd->khd", d_scores, queries)
    return d_q.to(dtype), d_k.to(dtype), d_v.to(dtype)


REFERENCE = Blocks("reference", _reference_forward, _reference_backward)


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[t, H, D] → [1, H, t, D], as torch's operators have it; nothing is copied."""
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).transpose(0, 1)


def _cudnn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale)
    return _tokens_first(out), lse.reshape(q.shape[1], len(q))


def _cudnn_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    inputs = _heads_first(d_out, q, k, v, out)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *inputs, lse[None, :, :, None], seed, seed, None, None, None, len(q), len(k), 0.0, causal, scale=scale
    )
    d_q, d_k, d_v = map(_tokens_first, grads)
    return d_q, d_k, d_v


CUDNN = Blocks("cudnn", _cudnn_forward, _cudnn_backward)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v), 0.0, causal, False, scale=scale)
    return _tokens_first(out), lse.squeeze(0)


def _flash_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    inputs = _heads_first(d_out, q, k, v, out)
    grads = aten._scaled_dot_product_flash_attention_backward(
        *inputs, lse.unsqueeze(0), None, None, len(q), len(k), 0.0, causal, seed, seed, scale=scale
    )
    d_q, d_k, d_v = map(_tokens_first, grads)
    return d_q, d_k, d_v


FLASH = Blocks("flash", _flash_forward, _flash_backward)


def _works(blocks: Blocks, dtype: torch.dtype) -> None:
    """Run a causal and a whole block with grouped heads and compare with `REFERENCE`.

    Raises:
        RuntimeError: the numbers are wrong.
        Exception: whatever the operators raise on this machine.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    for queries, keys, causal in ((256, 256, True), (128, 256, False)):
        q, k, v, d_out = draw(queries, 4, 64), draw(keys, 2, 64), draw(keys, 2, 64), draw(queries, 4, 64)
        # Of more keys than this block's: as in a ring, the log-sum-exp is above the block's own.
        out, lse = REFERENCE.forward(q, k, v, 0.125, causal)
        whole = (0.5 * out, lse + 0.7)
        wanted = [out, lse, *REFERENCE.backward(d_out, q, k, v, *whole, 0.125, causal)]
        got = [*blocks.forward(q, k, v, 0.125, causal), *blocks.backward(d_out, q, k, v, *whole, 0.125, causal)]
        for a, b in zip(got, wanted, strict=True):
            difference = ((a - b).float().norm() / b.float().norm()).item()
            if not difference < 0.03:
                raise RuntimeError(f"differs from the reference by {difference:.3g} of its norm")


class Choice(NamedTuple):
    """Which blocks run here, and why these, for the log."""

    short: Blocks
    long: Blocks  # of rows of DENSE_TOKENS and more: cuDNN plans its kernel anew for every length
    reason: str


@functools.cache
def choose_blocks(device_type: str, dtype: torch.dtype) -> Choice:
    """The fastest blocks that work here. `dtype` is the type attention runs in."""
    if device_type != "cuda":
        return Choice(REFERENCE, REFERENCE, f"device is {device_type}")
    if dtype not in (torch.bfloat16, torch.float16):
        return Choice(REFERENCE, REFERENCE, f"fast kernels take bfloat16 or float16 only, this run computes in {dtype}")
    working, reasons = [], []
    for blocks in (FLASH, CUDNN):
        try:
            _works(blocks, dtype)
            working.append(blocks)
        except Exception as error:
            reasons.append(f"not {blocks.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    working = working or [REFERENCE]
    reasons.insert(0, f"rows of {DENSE_TOKENS} tokens and more; {working[0].name} below" if len(working) > 1 else "all lengths")
    return Choice(working[0], working[-1], "; ".join(reasons))


def blocks_for(q: torch.Tensor, ranks: int) -> Blocks:
    """The blocks that run queries like these [t, Hq, D] of each of `ranks`."""
    choice = choose_blocks(q.device.type, q.dtype)
    return choice.long if ranks * len(q) >= DENSE_TOKENS else choice.short
