"""The vocabulary head: hidden states of trained positions → log-probability of a target and of other ids, entropy, argmax hit.

[N, V] logits never exist whole: terms are taken in chunks, and the backward computes each chunk's logits again, but for the
last one's, which a GPU keeps. There (bfloat16 or float16, no candidate sets) a chunk is a large product and one pass over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from trainers.head_kernels import can_fuse, probabilities_, row_statistics

CHUNK_ELEMENTS = 1 << 26  # logits held at a time: 256 MiB in float32
KEPT_SHARE = 48  # of a GPU's memory, the part that a chunk's logits may take: 2.9 GiB of 139


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


class _Form(NamedTuple):
    """How scores come from hidden states, and how the work is cut."""

    temperature: float
    softcap: float | None
    chunk: int  # terms at a time
    candidates: Candidates | None
    fused: bool  # by the kernels of `head_kernels`; the last chunk's logits are kept for the backward

    def outside(self, targets: torch.Tensor, start: int, vocabulary: int) -> torch.Tensor | None:
        """As in `Candidates`; None: every term of all chunks was sampled among the whole vocabulary."""
        return None if self.candidates is None else self.candidates.outside(targets, start, vocabulary)


class _Chunk(NamedTuple):
    """Of the terms of one chunk, in float32 or better."""

    lse: torch.Tensor  # [n], of all scores
    entropy: torch.Tensor  # [n]
    largest: torch.Tensor  # [n], score
    at_ids: torch.Tensor  # [n, 1 + K], log-probabilities of target and `top_ids`


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of one chunk [n, V] before softcap and temperature; in the first rows of `out`, if given."""
    if out is None:
        return torch.nn.functional.linear(hidden, weight, bias)
    logits = torch.mm(hidden, weight.T, out=out[: len(hidden)])
    return logits if bias is None else logits.add_(bias)


def _scores(logits: torch.Tensor, form: _Form) -> torch.Tensor:
    """Scores of some logits, in float32 or better: softcap, then temperature."""
    scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    return scores * (1.0 / form.temperature)


def _read(logits: torch.Tensor, ids: torch.Tensor, outside: torch.Tensor | None, form: _Form) -> _Chunk:
    """What the objective needs of a chunk's logits."""
    if form.fused:
        lse, mean, largest = row_statistics(logits, form.temperature, form.softcap)
        return _Chunk(lse, lse - mean, largest, _scores(logits.gather(-1, ids), form) - lse[:, None])
    scores = _scores(logits, form)
    if outside is not None:
        scores.masked_fill_(outside, float("-inf"))
    lse, largest = torch.logsumexp(scores, -1), scores.amax(-1)
    logprobs = scores.sub_(lse[:, None])
    at_ids = logprobs.gather(-1, ids)
    # p log p is 0 where p underflows, also at −inf.
    entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return _Chunk(lse, entropy, largest, at_ids)


def _gradient(
    logits: torch.Tensor,
    ids: torch.Tensor,
    outside: torch.Tensor | None,
    lse: torch.Tensor,
    at_ids: torch.Tensor,
    slopes: torch.Tensor,
    form: _Form,
) -> torch.Tensor:
    """Gradient by the logits [n, V] of Σ slopes · log-probabilities; may overwrite them.

    d log p[id] / d score = onehot(id) − p. At the ids themselves the two are put together before they are rounded: for a likely
    token they nearly cancel.
    """
    total = slopes.sum(-1)
    if form.fused:
        gradient = probabilities_(logits, lse, total, form.temperature, form.softcap)
    else:
        scores = _scores(logits, form)
        gradient = (scores - lse[:, None]).exp_().mul_(-total[:, None] / form.temperature)
        if form.softcap is not None:
            gradient.mul_(1 - (scores * (form.temperature / form.softcap)).square())
        if outside is not None:
            gradient.masked_fill_(outside, 0.0)
    # An id that is named twice gets both slopes, at both places.
    if ids.shape[1] > 1:
        slopes = ((ids[:, :, None] == ids[:, None, :]).to(slopes.dtype) @ slopes[:, :, None]).squeeze(-1)
    values = (slopes - total[:, None] * at_ids.exp()) / form.temperature
    if form.softcap is not None:
        values.mul_(1 - ((at_ids + lse[:, None]) * (form.temperature / form.softcap)).square())
    # An id outside the candidates has log-probability −inf whatever the logits.
    return gradient.scatter_(-1, ids, torch.where(at_ids.isneginf(), 0.0, values).to(gradient.dtype))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, the product in the type of `total`."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class _TokenLogprobs(torch.autograd.Function):
    """The ids of a term are its target, then its `top_ids`; where one is none, the target again, with slope 0."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        form: _Form,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        terms = hidden.shape[0]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        at_ids = hidden.new_empty(ids.shape, dtype=dtype)
        entropy, lse = hidden.new_empty(terms, dtype=dtype), hidden.new_empty(terms, dtype=dtype)
        hit = torch.empty(terms, dtype=torch.bool, device=hidden.device)
        buffer = hidden.new_empty(min(form.chunk, terms), len(weight)) if form.fused else None
        for start in range(0, terms, form.chunk):
            part = slice(start, start + form.chunk)
            logits = _logits(hidden[part], weight, bias, buffer)
            outside = form.outside(ids[part, 0], start, len(weight))
            read = _read(logits, ids[part], outside, form)
            lse[part], entropy[part], at_ids[part] = read.lse, read.entropy, read.at_ids
            # No id is likelier; equal up to rounding, because it is computed in two ways.
            target = at_ids[part, 0] + read.lse
            hit[part] = target >= read.largest - 1e-6 * read.largest.abs().clamp_min(1.0)
        ctx.save_for_backward(hidden, weight, bias, ids, lse, at_ids)
        ctx.form, ctx.kept = form, buffer
        ctx.mark_non_differentiable(entropy, hit)
        return at_ids, entropy, hit

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, ids, lse, at_ids = ctx.saved_tensors
        form: _Form = ctx.form
        # A second backward through the same graph computes the last chunk's logits again: this one overwrites them.
        buffer, ctx.kept = ctx.kept, None
        kept = buffer is not None
        if form.fused and not kept:
            buffer = hidden.new_empty(min(form.chunk, len(hidden)), len(weight))
        starts = range(0, hidden.shape[0], form.chunk)
        low = weight.dtype in (torch.bfloat16, torch.float16)
        d_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32: bfloat16 would lose small contributions. A frozen head (beside an adapter) has no sum.
        summed = torch.float32 if low and len(starts) > 1 else weight.dtype
        d_weight = torch.zeros_like(weight, dtype=summed) if ctx.needs_input_grad[1] and len(starts) != 1 else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32 if low else bias.dtype) if ctx.needs_input_grad[2] else None
        for start in reversed(starts):
            part = slice(start, start + form.chunk)
            if kept and buffer is not None and start == starts[-1]:
                logits = buffer[: len(hidden) - start]
            else:
                logits = _logits(hidden[part], weight, bias, buffer)
            outside = form.outside(ids[part, 0], start, len(weight))
            d_logits = _gradient(logits, ids[part], outside, lse[part], at_ids[part], grads[0][part], form).to(weight.dtype)
            torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[part])
            elif ctx.needs_input_grad[1]:
                d_weight = d_logits.T @ hidden
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=d_bias.dtype)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _chunk_terms(hidden: torch.Tensor, weight: torch.Tensor, fused: bool) -> int:
    """Terms whose logits are held at a time."""
    elements = CHUNK_ELEMENTS
    if fused and hidden.is_cuda:
        # Few large products reach the device's speed, and the last chunk's logits are kept from forward to backward.
        memory = torch.cuda.get_device_properties(hidden.device).total_memory
        elements = max(elements, memory // KEPT_SHARE // hidden.element_size())
    return max(16, elements // weight.shape[0])


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
    if top_ids is None:
        top_ids = targets.new_empty((len(targets), 0))
    fused = can_fuse(hidden) and candidates is None
    form = _Form(temperature, softcap, chunk or _chunk_terms(hidden, weight, fused), candidates, fused)
    none = top_ids < 0
    ids = torch.cat([targets[:, None], torch.where(none, targets[:, None], top_ids)], 1)
    at_ids, entropy, hit = _TokenLogprobs.apply(hidden, weight, bias, ids, form)
    # Copied: a sharded module that hands out a view is warned of, for what writes into it would lose the backward's hook.
    return HeadOutputs(at_ids[:, 0].clone(), entropy, hit, at_ids[:, 1:].masked_fill(none, float("-inf")))
