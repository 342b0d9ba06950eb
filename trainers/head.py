"""The vocabulary head: hidden states of trained positions → log-probability of a target, entropy, argmax hit.

[N, V] logits never exist whole: terms are taken in chunks, and the backward computes each chunk's logits again.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 26  # logits held at a time: 256 MiB in float32


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None) -> torch.Tensor:
    """Logits of one chunk [n, V] before the temperature, in float32 or better."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        terms = hidden.shape[0]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(terms, dtype=dtype)
        entropy = hidden.new_empty(terms, dtype=dtype)
        hit = torch.empty(terms, dtype=torch.bool, device=hidden.device)
        lse = hidden.new_empty(terms, dtype=dtype)
        for start in range(0, terms, chunk):
            part = slice(start, start + chunk)
            scores = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            lse[part] = torch.logsumexp(scores, -1)
            logprobs[part] = scores.gather(-1, targets[part, None]).squeeze(-1) - lse[part]
            hit[part] = scores.argmax(-1) == targets[part]
            scores.sub_(lse[part, None])
            # p log p is 0 where p underflows, also at −inf.
            entropy[part] = -(scores.exp() * scores.clamp_min(torch.finfo(dtype).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.options = (temperature, softcap, chunk)
        ctx.mark_non_differentiable(entropy, hit)
        return logprobs, entropy, hit

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        temperature, softcap, chunk = ctx.options
        low = weight.dtype in (torch.bfloat16, torch.float16)
        d_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32: bfloat16 would lose small contributions.
        d_weight = torch.zeros_like(weight, dtype=torch.float32 if low else weight.dtype)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=d_weight.dtype)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, softcap)
            slope = None if softcap is None else 1 - (logits / softcap).square()
            # d log p[target] / d logits = (onehot − p) / temperature
            d_logits = logits.div_(temperature).sub_(lse[part, None]).exp_().neg_()
            d_logits.scatter_add_(-1, targets[part, None], torch.ones_like(d_logits[:, :1]))
            d_logits.mul_(grads[0][part, None] / temperature)
            if slope is not None:
                d_logits.mul_(slope)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            d_weight += d_logits.T @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            d_weight.to(weight.dtype),
            None if bias is None or d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of each target under softmax(logits / temperature), entropy, and whether the target is the argmax.

    Args:
        hidden: [N, H], the hidden states of the positions that predict the targets.
        weight: [V, H]; `bias` [V].
        targets: int64 [N].
        softcap: logits are `softcap · tanh(logits / softcap)` first.
        chunk: terms per chunk; default: as many as keep a chunk's logits within `CHUNK_ELEMENTS`.

    Returns:
        logprobs [N] (differentiable in hidden, weight and bias), entropy [N] and argmax_hit bool [N] (both detached);
        float32, or float64 for float64 inputs.
    """
    size = chunk or max(16, CHUNK_ELEMENTS // weight.shape[0])
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, softcap, size)  # type: ignore[return-value]
