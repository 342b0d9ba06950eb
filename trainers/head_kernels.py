"""Triton kernels of the vocabulary head: what is done to a chunk of logits, in one pass over it each.

    logits [n, V] (cuBLAS) ─▶ `row_statistics`: lse, mean score, largest score ─▶ … ─▶ `probabilities_`: −slope · p, in place

Scores are softcap(logits) / temperature. The chunk is read once in the forward, read and written once in the backward, so that
the matrix products decide the time. `TRITON_INTERPRET=1` runs both on a CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

import torch

from trainers import kernel_trial

try:
    import triton
    import triton.language as tl
except ImportError:  # the head then computes the same in torch
    triton = None

BLOCK = 8192  # columns a program holds at a time
WARPS = 16

if triton is not None:

    @triton.jit
    def _scores(x, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):
        """Scores of logits, float32, and the derivative of the softcap."""
        slope = tl.full(x.shape, 1.0, tl.float32)
        if HAS_SOFTCAP:
            # tanh by exp, which no version of triton lacks; the exponent is never positive, so that nothing overflows.
            decay = tl.exp(-2.0 * tl.abs(x) / softcap)
            bent = (1.0 - decay) / (1.0 + decay)
            slope = 1.0 - bent * bent
            x = tl.where(x < 0, -bent, bent) * softcap
        return x * inverse_temperature, slope

    @triton.jit
    def _row_statistics(
        logits, row_stride, lse, mean, largest, columns, softcap, inverse_temperature,
        HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        top = float("-inf")
        total = 0.0
        weighted = 0.0
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < columns
            x = tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32)
            score, _ = _scores(x, softcap, inverse_temperature, HAS_SOFTCAP)
            score = tl.where(inside, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp(score - base)
            scale = tl.exp(top - base)
            total = total * scale + tl.sum(weight, 0)
            weighted = weighted * scale + tl.sum(tl.where(weight > 0, weight * score, 0.0), 0)
            top = new_top
        tl.store(lse + row, top + tl.log(total))
        tl.store(mean + row, weighted / total)
        tl.store(largest + row, top)

    @triton.jit
    def _probabilities_(
        logits, row_stride, lse, slopes, columns, softcap, inverse_temperature,
        HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        lse_row = tl.load(lse + row)
        slope_row = tl.load(slopes + row) * inverse_temperature
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < columns
            x = tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32)
            score, bend = _scores(x, softcap, inverse_temperature, HAS_SOFTCAP)
            value = -slope_row * tl.exp(score - lse_row) * bend
            tl.store(logits + offsets, value.to(logits.dtype.element_ty), mask=inside)


def can_fuse(hidden: torch.Tensor) -> bool:
    """Whether the kernels take these hidden states' logits."""
    if triton is None or hidden.dtype == torch.float64:
        return False
    return kernel_trial.takes(hidden)


def row_statistics(
    logits: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row of logits [n, V] (last dimension contiguous), float32 [n] each: log Σ exp(score), the scores' mean under
    softmax(scores), the largest score. Entropy is the first less the second."""
    rows, columns = logits.shape
    lse, mean, largest = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    _row_statistics[(rows,)](
        logits, logits.stride(0), lse, mean, largest, columns, softcap or 1.0, 1.0 / temperature,
        HAS_SOFTCAP=softcap is not None, BLOCK=BLOCK, num_warps=WARPS,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return lse, mean, largest


def probabilities_(
    logits: torch.Tensor, lse: torch.Tensor, slopes: torch.Tensor, temperature: float, softcap: float | None
) -> torch.Tensor:
    """Overwrites logits [n, V] with −slopes · softmax(scores) · d score / d logit: the gradient of slopes · (−lse).

    Args:
        lse, slopes: float32 [n].
    """
    rows, columns = logits.shape
    _probabilities_[(rows,)](
        logits, logits.stride(0), lse, slopes, columns, softcap or 1.0, 1.0 / temperature,
        HAS_SOFTCAP=softcap is not None, BLOCK=BLOCK, num_warps=WARPS,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return logits
