"""Generalised Jensen-Shannon divergence (arXiv:2306.13649) of two distributions known at a few tokens, and its metrics.

β = 0 is KL(teacher ‖ student), β = 1 is KL(student ‖ teacher), and between them, with M = (1 − β) P_S + β P_T,
β KL(P_T ‖ M) + (1 − β) KL(P_S ‖ M).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainers.algorithms import LossInputs

_MOST_MASS = -1e-7  # log of the most that a support may hold, so that the tail has a logarithm


class Divergence(NamedTuple):
    """Per position, nats. The student's log-probabilities carry `jsd`'s gradient."""

    jsd: torch.Tensor  # [N]
    teacher_entropy: torch.Tensor  # [N], detached; of the distribution that the divergence is taken over


def sparse_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float, tail: bool) -> Divergence:
    """Divergence over the tokens known of both.

    A token that either side gives −inf is not of the support: what the other gives it belongs to the rest. So the value and its
    gradient are finite whatever comes in.

    Args:
        student, teacher: [N, K], log-probabilities under whole distributions of the same K different tokens.
        tail: the rest of the vocabulary counts as one more token, log(1 − exp(min(logsumexp(support), −1e-7))); else both sides
            are renormalised over the support.
    """
    support = student.isfinite() & teacher.isfinite()
    log_s = _coarsened(student, support, tail)
    with torch.no_grad():
        log_t = _coarsened(teacher, support, tail)
        if tail:
            support = torch.cat([support, support.new_ones(len(support), 1)], -1)
        p_t = torch.where(support, log_t.exp(), 0.0)
        entropy = -(p_t * log_t).sum(-1)
    if beta == 0:
        return Divergence((p_t * (log_t - log_s)).sum(-1), entropy)
    p_s = torch.where(support, log_s.exp(), 0.0)
    if beta == 1:
        return Divergence((p_s * (log_s - log_t)).sum(-1), entropy)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    return Divergence((beta * p_t * (log_t - log_m) + (1 - beta) * p_s * (log_s - log_m)).sum(-1), entropy)


def _coarsened(logprobs: torch.Tensor, support: torch.Tensor, tail: bool) -> torch.Tensor:
    """[N, K], or [N, K + 1] with the tail: log-probabilities that sum to one over the support; 0 off it, without gradient."""
    mass = torch.logsumexp(logprobs.masked_fill(~support, torch.finfo(logprobs.dtype).min), -1, keepdim=True)
    known = torch.where(support, logprobs, 0.0)
    if not tail:
        return torch.where(support, known - mass, 0.0)
    return torch.cat([known, torch.log(-torch.expm1(mass.clamp_max(_MOST_MASS)))], -1)


def supports(inputs: LossInputs, tops: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Student's and teacher's log-probabilities [N, 1 + K] of the realised token and, with `tops`, of the K others."""
    assert inputs.teacher_logprobs is not None, "a row without a teacher"
    student, teacher = inputs.logprobs[:, None], inputs.teacher_logprobs[:, None]
    if not tops:
        return student.detach(), teacher
    return torch.cat([student, inputs.top_logprobs], 1), torch.cat([teacher, inputs.other_top_logprobs], 1)


@torch.no_grad()
def divergence_metrics(
    inputs: LossInputs, divergence: Divergence, teachers: Sequence[str]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | float]]:
    """Means over trained tokens, none weighted; of several teachers each one's own as well."""
    assert inputs.teacher_index is not None, "a row without a teacher"
    count = float(inputs.logprobs.numel())
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor | float]] = {
        "jsd": (divergence.jsd.sum(), count),
        "entropy": (inputs.entropy.sum(), count),
        "teacher_entropy": (divergence.teacher_entropy.sum(), count),
    }
    if len(teachers) > 1:
        columns = torch.stack([divergence.jsd, divergence.teacher_entropy, torch.ones_like(divergence.jsd)], 1)
        sums = columns.new_zeros(len(teachers), 3).index_add(0, inputs.teacher_index, columns)
        for name, (jsd, entropy, tokens) in zip(teachers, sums, strict=True):
            metrics[f"teacher_jsd/{name}"] = (jsd, tokens)
            metrics[f"teacher_entropy/{name}"] = (entropy, tokens)
            metrics[f"teacher_token_frac/{name}"] = (tokens, count)
    return metrics
