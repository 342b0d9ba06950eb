"""The vocabulary head: hidden states of trained positions → log-probability of a target and of other ids, entropy, argmax hit.

[N, V] logits never exist whole: terms are taken in chunks, and the backward computes each chunk's logits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

CHUNK_ELEMENTS = 1 << 26  # logits held at a time: 256 MiB in float32


class HeadOutputs(NamedTuple):
    """Per-term outputs, float32, or float64 for float64 inputs."""

    logprobs: torch.Tensor  # [N], of the target; differentiable
    entropy: torch.Tensor  # [N], detached
    argmax_hit: torch.Tensor  # bool [N], the target is the likeliest token
    top_logprobs: torch.Tensor  # [N, K], of the ids asked for, −inf where the id is −1; differentiable


@dataclass(slots=True)
class Candidates:
    """The ids each term's token was sampled among, one term's after another's. A term without any: the whole vocabulary.

    Example: terms sampled among {3, 7}, everything and {4} have `ids=[3, 7, 4]`, `owner=[0, 0, 2]`, `offsets=[0, 2, 2, 3]`.
    """

    ids: torch.Tensor  # int64 [C]
    owner: torch.Tensor  # int64 [C], the term
    limited: torch.Tensor  # bool [N], the term has a candidate set
    offsets: np.ndarray  # int64 [N + 1], on the host, so that slicing a chunk waits for no device

    def outside(self, targets: torch.Tensor, start: int, vocabulary: int) -> torch.Tensor:
        """bool [n, V]: the ids that terms start … start + n were not sampled among. A target is always inside."""
        stop = start + len(targets)
        part = slice(int(self.offsets[start]), int(self.offsets[stop]))
        outside = self.limited[start:stop, None].repeat(1, vocabulary)
        outside[self.owner[part] - start, self.ids[part]] = False
        return outside.scatter_(-1, targets[:, None], False)


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
        top_ids: torch.Tensor,
        candidates: Candidates | None,
        temperature: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        terms = hidden.shape[0]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(terms, dtype=dtype)
        entropy = hidden.new_empty(terms, dtype=dtype)
        hit = torch.empty(terms, dtype=torch.bool, device=hidden.device)
        top = hidden.new_empty(top_ids.shape, dtype=dtype)
        lse = hidden.new_empty(terms, dtype=dtype)
        for start in range(0, terms, chunk):
            part = slice(start, start + chunk)
            scores = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            if candidates is not None:
                scores.masked_fill_(candidates.outside(targets[part], start, len(weight)), float("-inf"))
            lse[part] = torch.logsumexp(scores, -1)
            hit[part] = scores.argmax(-1) == targets[part]
            scores.sub_(lse[part, None])
            logprobs[part] = scores.gather(-1, targets[part, None]).squeeze(-1)
            ids = top_ids[part]
            top[part] = scores.gather(-1, ids.clamp_min(0)).masked_fill_(ids < 0, float("-inf"))
            # p log p is 0 where p underflows, also at −inf.
            entropy[part] = -(scores.exp() * scores.clamp_min(torch.finfo(dtype).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, top_ids, lse)
        ctx.options = (candidates, temperature, softcap, chunk)
        ctx.mark_non_differentiable(entropy, hit)
        return logprobs, entropy, hit, top

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, top_ids, lse = ctx.saved_tensors
        candidates, temperature, softcap, chunk = ctx.options
        low = weight.dtype in (torch.bfloat16, torch.float16)
        d_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32: bfloat16 would lose small contributions. A frozen head (beside an adapter) has no sum.
        summed = torch.float32 if low else weight.dtype
        d_weight = torch.zeros_like(weight, dtype=summed) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=summed) if bias is not None and ctx.needs_input_grad[2] else None
        # One column per log-probability handed out: the target's, then those of `top_ids`.
        ids = torch.cat([targets[:, None], top_ids.clamp_min(0)], 1)
        slopes = torch.cat([grads[0][:, None], grads[3].masked_fill(top_ids < 0, 0.0)], 1).div_(temperature)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            scores = _logits(hidden[part], weight, bias, softcap)
            softcap_slope = None if softcap is None else 1 - (scores / softcap).square()
            scores.div_(temperature)
            outside = None if candidates is None else candidates.outside(targets[part], start, len(weight))
            if outside is not None:
                scores.masked_fill_(outside, float("-inf"))
            # d log p[id] / d logits = (onehot(id) − p) / temperature
            d_logits = scores.sub_(lse[part, None]).exp_().mul_(-slopes[part].sum(-1, keepdim=True))
            d_logits.scatter_add_(-1, ids[part], slopes[part])
            if outside is not None:
                d_logits.masked_fill_(outside, 0.0)
            if softcap_slope is not None:
                d_logits.mul_(softcap_slope)
            d_logits = d_logits.to(weight.dtype)
            d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    top_ids: torch.Tensor | None = None,
    candidates: Candidates | None = None,
    chunk: int | None = None,
) -> HeadOutputs:
    """Log-probability of each target under softmax(logits / temperature), entropy, whether it is the argmax; and of `top_ids`.

    With `candidates` the softmax is over a term's candidate set alone, for all outputs: log π(v) − log Σ_C π. So the entropy is
    that of the distribution the token was sampled from, and an id outside the set has log-probability −inf.

    Args:
        hidden: [N, H], the hidden states of the positions that predict the targets.
        weight: [V, H]; `bias` [V].
        targets: int64 [N].
        softcap: logits are `softcap · tanh(logits / softcap)` first.
        top_ids: int64 [N, K], more ids to score; −1: none.
        chunk: terms per chunk; default: as many as keep a chunk's logits within `CHUNK_ELEMENTS`.
    """
    size = chunk or max(16, CHUNK_ELEMENTS // weight.shape[0])
    if top_ids is None:
        top_ids = targets.new_empty((len(targets), 0))
    outputs = _TokenLogprobs.apply(hidden, weight, bias, targets, top_ids, candidates, temperature, softcap, size)
    return HeadOutputs(*outputs)  # type: ignore[misc]
