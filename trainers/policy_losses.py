"""Policy losses over one row's terms, as sums: what they are divided by is the objective's to say.

p = π is the policy, q the sampler, r = π/q a sampled token's ratio, A its advantage. Everything is over one distribution: where
a token was sampled among a candidate set, p and q are both renormalised over it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trainers.algorithms import LossInputs
from trainers.config import PolicyLossConfig

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor | float]]

_TAIL_FLOOR = 1e-6  # policy mass off H below which rounding decides


class Bounds(NamedTuple):
    """Of a ratio: a term is masked outside `low` … `high`, and clipped beyond `clip_low` for A < 0, `clip_high` for A > 0."""

    low: float
    high: float
    clip_low: float
    clip_high: float

    @classmethod
    def of(cls, config: PolicyLossConfig) -> Bounds:
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        low_ratio, high_ratio = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        return cls(low_ratio, high_ratio, 1 - config.epsilon, 1 + high)


def policy_loss(inputs: LossInputs, config: PolicyLossConfig) -> tuple[torch.Tensor, Metrics]:
    """Centered with `score_centering`, else weighted by `importance_sampling`, or clipped where that is none."""
    bounds = Bounds.of(config)
    if config.score_centering:
        loss, metrics = centered_loss(inputs, bounds, truncated=config.importance_sampling == "token_truncate")
    elif config.importance_sampling == "none":
        loss, metrics = clipped_loss(inputs, bounds), {}
    else:
        loss, metrics = weighted_loss(inputs, bounds, config.importance_sampling)
    return loss, metrics | ratio_metrics(inputs, bounds)


def clipped_loss(inputs: LossInputs, bounds: Bounds) -> torch.Tensor:
    """Σ −min(r A, clip(r, clip_low, clip_high) A) (arXiv:1707.06347)."""
    ratio = (inputs.logprobs - inputs.sampler_logprobs).exp()
    clipped = ratio.clamp(bounds.clip_low, bounds.clip_high)
    return -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages).sum()


def weighted_loss(inputs: LossInputs, bounds: Bounds, mode: str) -> tuple[torch.Tensor, Metrics]:
    """Σ −A·sg(w)·log π, without the clip: w is a bounded importance weight of the token, or of its sequence.

    `token_truncate` (TIS): w = min(max(r, low), high); `token_mask` (IcePop): w = r where low ≤ r ≤ high, else 0;
    `sequence_truncate`, `sequence_mask`: the same of the product of r over the sequence's trained tokens. A masked term stays a
    term of whatever the sum is divided by.
    """
    with torch.no_grad():
        log_ratio = inputs.logprobs - inputs.sampler_logprobs
        if mode.startswith("sequence") and len(log_ratio):
            sums = log_ratio.new_zeros(int(inputs.sequence_index.max()) + 1).index_add(0, inputs.sequence_index, log_ratio)
            log_ratio = sums[inputs.sequence_index]
        ratio = log_ratio.exp()
        outside = (ratio < bounds.low) | (ratio > bounds.high)
        masks = mode.endswith("mask")
        weight = torch.where(outside, 0.0, ratio) if masks else ratio.clamp(bounds.low, bounds.high)
        count = float(ratio.numel())
        metrics: Metrics = {
            "sampling/masked_mean": (outside.sum() * masks, count),
            "sampling/ratio_outside_frac": (outside.sum(), count),
        }
    return -(inputs.advantages * weight * inputs.logprobs).sum(), metrics


def centered_loss(inputs: LossInputs, bounds: Bounds, truncated: bool = False) -> tuple[torch.Tensor, Metrics]:
    """Σ −A·sg(w)·log π + A·C: bounded importance weights with the sampler's expected score taken off. w = r·gate(r): masked.

    Under q the expected score E[w ∇log π] of masked weights is not zero, so every update would move the policy whatever the
    rewards. Known of q are the sampled token and H, the likeliest tokens; the rest of the vocabulary is taken to differ by one
    factor, q = ρ p. Then the expected score is the gradient of C = Σ_H sg(m − α p) log p, with

    - gate(x) = 1 if low ≤ x ≤ high and x is not clipped for the sign of A, else 0;
    - m = p·gate(p/q) on H;
    - α = gate(1/ρ), 0 if ρ = 0; ρ = (1 − Σ_H q) / max(1 − Σ_H p, 1e-6).

    `truncated`: in place of the gates w = clamp(r, low, high), without the clip; m = clamp(p, low q, high q);
    α = clamp(1, low ρ, high ρ).

    A masked term stays a term of whatever the sum is divided by.
    """
    advantages = inputs.advantages
    up, down = advantages > 0, advantages < 0

    def gate(ratio: torch.Tensor) -> torch.Tensor:
        """For ratios [N, …]."""
        shape = (-1, *[1] * (ratio.dim() - 1))
        clipped = (up.view(shape) & (ratio > bounds.clip_high)) | (down.view(shape) & (ratio < bounds.clip_low))
        return (ratio >= bounds.low) & (ratio <= bounds.high) & ~clipped

    # An id that is none, or that is no candidate, has −inf on either side and takes no part: 0 · −inf would be not a number.
    known = inputs.other_top_logprobs.isfinite() & inputs.top_logprobs.isfinite()
    log_p = torch.where(known, inputs.top_logprobs, 0.0)
    with torch.no_grad():
        ratio = (inputs.logprobs - inputs.sampler_logprobs).exp()
        kept = gate(ratio)
        weight = ratio.clamp(bounds.low, bounds.high) if truncated else torch.where(kept, ratio, 0.0)
        log_q = torch.where(known, inputs.other_top_logprobs, 0.0)
        p, q = torch.where(known, log_p.exp(), 0.0), torch.where(known, log_q.exp(), 0.0)
        sampler_mass = q.sum(-1)
        rho = (1 - sampler_mass).clamp_min(0) / (1 - p.sum(-1)).clamp_min(_TAIL_FLOOR)
        if truncated:
            alpha = torch.ones_like(rho).clamp(bounds.low * rho, bounds.high * rho)
            center = p.clamp(bounds.low * q, bounds.high * q) - p * alpha[:, None]
        else:
            alpha = gate(1 / rho) & (rho > 0)
            center = p * gate((log_p - log_q).exp()) - p * alpha[:, None]
        outside = (ratio < bounds.low) | (ratio > bounds.high)
        count = float(ratio.numel())
        metrics: Metrics = {
            "sampling/masked_mean": ((~kept).sum() * (not truncated), count),
            "sampling/ratio_outside_frac": (outside.sum(), count),
            "sampling/sampler_mass": (sampler_mass.sum(), count),
        }
    return (advantages * ((center * log_p).sum(-1) - weight * inputs.logprobs)).sum(), metrics


@torch.no_grad()
def ratio_metrics(inputs: LossInputs, bounds: Bounds) -> Metrics:
    """Ratio, divergence from the sampler, entropy, and what the clipped loss clips."""
    log_ratio = inputs.logprobs - inputs.sampler_logprobs
    ratio, count = log_ratio.exp(), float(log_ratio.numel())
    low = ((ratio < bounds.clip_low) & (inputs.advantages < 0)).sum()
    high = ((ratio > bounds.clip_high) & (inputs.advantages > 0)).sum()
    return {
        "ratio": (ratio.sum(), count),
        "kl": (((ratio - 1) - log_ratio).sum(), count),
        "entropy": (inputs.entropy.sum(), count),
        "clip_ratio/low_mean": (low, count),
        "clip_ratio/high_mean": (high, count),
        "clip_ratio/region_mean": (low + high, count),
        "clip_ratio/low_min": (low / max(count, 1), 1.0),
        "clip_ratio/high_max": (high / max(count, 1), 1.0),
    }
