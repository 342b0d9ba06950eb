"""Score centering: the update's expectation under the sampler, enumerated over a vocabulary of six."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainers.algorithms import LossInputs
from trainers.config import GRPOConfig
from trainers.policy_losses import Bounds, centered_loss, weighted_loss

VOCABULARY = 6
BOUNDS = Bounds(0.5, 5.0, 0.8, 1.2)
LOGITS = torch.tensor([1.0, 0.4, -0.3, 0.1, -1.2, 0.7], dtype=torch.float64)


def expected_update(
    logits: torch.Tensor,
    q: torch.Tensor,
    advantage: float,
    top: list[int],
    within: list[int] | None = None,
    truncated: bool = False,
):
    """Σ_v q(v) ∇ loss(v), and the metrics: one term per token the sampler may give, each weighed by its probability.

    Args:
        top: H; −1: none.
        within: the candidate set; the policy is renormalised over it.
    """
    leaf = logits.clone().requires_grad_()
    scores = leaf if within is None else leaf.masked_fill(torch.tensor([i not in within for i in range(len(leaf))]), -torch.inf)
    logprobs = scores.log_softmax(-1)
    ids = torch.tensor(top, dtype=torch.long)
    gathered = torch.where(ids < 0, -torch.inf, logprobs[ids.clamp_min(0)])
    sampler_top = torch.where(ids < 0, -torch.inf, q.log()[ids.clamp_min(0)])
    total, all_metrics = torch.zeros((), dtype=torch.float64), []
    for token in torch.nonzero(q).flatten().tolist():
        one = torch.ones(1, dtype=torch.float64)
        inputs = LossInputs(
            logprobs=logprobs[token : token + 1],
            entropy=one,
            argmax_hit=one.bool(),
            sampler_logprobs=q[token : token + 1].log(),
            advantages=one * advantage,
            sequence_index=one.long(),
            top_logprobs=gathered[None],
            other_top_logprobs=sampler_top[None],
        )
        loss, metrics = centered_loss(inputs, BOUNDS, truncated)
        total = total + q[token] * loss
        all_metrics.append({name: (float(n), float(d)) for name, (n, d) in metrics.items()})
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient, all_metrics


def sampler(seed: int, scale: float) -> torch.Tensor:
    noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (LOGITS + scale * noise).softmax(-1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_with_the_whole_vocabulary_known_the_expected_update_is_zero(seed, advantage):
    q = 0.6 * LOGITS.softmax(-1) + 0.4 * sampler(seed, 2.5)  # so that something is kept and something masked
    gradient, metrics = expected_update(LOGITS, q, advantage, list(range(VOCABULARY)))
    assert gradient.abs().max().item() < 1e-12
    assert 0 < sum(m["sampling/masked_mean"][0] for m in metrics) < VOCABULARY
    without, _ = expected_update(LOGITS, q, advantage, [])
    assert without.abs().max().item() > 0.01


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_truncated_weights_are_centered_too(advantage):
    outside = 0.0
    for seed in range(4):
        q = sampler(seed, 2.5)
        gradient, metrics = expected_update(LOGITS, q, advantage, list(range(VOCABULARY)), truncated=True)
        assert gradient.abs().max().item() < 1e-12 and not any(m["sampling/masked_mean"][0] for m in metrics)
        without, _ = expected_update(LOGITS, q, advantage, [], truncated=True)
        assert without.abs().max().item() > 0.001
        outside += sum(m["sampling/ratio_outside_frac"][0] for m in metrics)
    assert outside > 0, "no weight was truncated"


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("rho", [0.3, 3.0])
def test_with_two_tokens_known_and_one_factor_off_them_it_is_zero(rho, advantage, truncated):
    top, logits = [0, 5], LOGITS.clone()
    if rho > 1:
        logits[top] += 3.0  # three times the rest of the mass must still leave some for H
    p = logits.softmax(-1)
    q = rho * p
    q[0] = p[0]  # one token is kept under either sign
    q[5] = 1 - q[:5].sum()
    assert q.min() > 0
    gradient, _ = expected_update(logits, q, advantage, top, truncated=truncated)
    assert gradient.abs().max().item() < 1e-12
    without, _ = expected_update(logits, q, advantage, [], truncated=truncated)
    assert without.abs().max().item() > 0.01
    padded, _ = expected_update(logits, q, advantage, [*top, -1, -1], truncated=truncated)
    assert padded.abs().max().item() < 1e-12


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_within_candidates_both_are_renormalised_and_it_is_zero(advantage):
    within = [0, 1, 3, 5]
    q = sampler(1, 1.5)
    q[[i for i in range(VOCABULARY) if i not in within]] = 0
    q = q / q.sum()
    # The server's top tokens beyond the candidates have log-probability −inf, and are none.
    gradient, metrics = expected_update(LOGITS, q, advantage, [*within, -1], within)
    assert gradient.abs().max().item() < 1e-12
    assert metrics[0]["sampling/sampler_mass"][0] == pytest.approx(1)
    without, _ = expected_update(LOGITS, q, advantage, [], within)
    assert without.abs().max().item() > 0.01


def test_loss_by_hand():
    """One term, p = (0.5, 0.25, 0.25), q = (0.2, 0.4, 0.4), A = 1, H = {0}, token 1 sampled.

    r = 0.625 is kept. On H p/q = 2.5 is clipped, so m = 0; ρ = 0.8 / 0.5, 1/ρ = 0.625 is kept, α = 1; C = −0.5 log p_0.
    """
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    one = torch.ones(1, dtype=torch.float64)
    inputs = LossInputs(
        logprobs[1:2], one, one.bool(), (0.4 * one).log(), one, one.long(), logprobs[None, :1], (0.2 * one).log()[None]
    )
    loss, metrics = centered_loss(inputs, BOUNDS)
    assert loss.item() == pytest.approx(-0.625 * np.log(0.25) - 0.5 * np.log(0.5))
    (gradient,) = torch.autograd.grad(loss, logits)
    score_1, score_0 = np.array([-0.5, 0.75, -0.25]), np.array([0.5, -0.25, -0.25])
    np.testing.assert_allclose(gradient, -0.625 * score_1 - 0.5 * score_0, atol=1e-12)
    values = {name: float(n) / float(d) for name, (n, d) in metrics.items()}
    assert values == {
        "sampling/masked_mean": 0.0,
        "sampling/ratio_outside_frac": 0.0,
        "sampling/sampler_mass": pytest.approx(0.2),
    }


def test_ratios_beyond_any_number_mask_the_term_and_keep_it_finite():
    """A sampler that was sure of another token: r overflows, p underflows; both are masked, nothing is NaN."""
    logprobs = torch.tensor([-0.1, -800.0], requires_grad=True)
    tops = torch.tensor([[-0.1, -torch.inf], [-900.0, -1e-4]], requires_grad=True)
    zeros = torch.zeros(2)
    inputs = LossInputs(
        logprobs, zeros, zeros.bool(), torch.tensor([-120.0, -0.1]), torch.tensor([1.0, -1.0]), zeros.long(),
        tops, torch.tensor([[-120.0, -0.2], [-0.1, -torch.inf]]),
    )  # fmt: skip
    truncated, _ = centered_loss(inputs, BOUNDS, truncated=True)
    assert torch.isfinite(truncated)
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(truncated, [logprobs, tops]))
    loss, metrics = centered_loss(inputs, BOUNDS)
    assert torch.isfinite(loss) and metrics["sampling/masked_mean"][0] == 2
    assert metrics["sampling/ratio_outside_frac"][0] == 2
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(loss, [logprobs, tops]))


# Weights without centering


@pytest.mark.parametrize(
    ("mode", "weights", "masked"),
    [
        # r = 0.25, 2.4, 8, 0.55; the bounds are 0.5 and 5
        ("token_truncate", [0.5, 2.4, 5.0, 0.55], 0),
        ("token_mask", [0.0, 2.4, 0.0, 0.55], 2),
        # the first two terms are a sequence: 0.25 · 2.4 = 0.6; the others another: 8 · 0.55 = 4.4
        ("sequence_truncate", [0.6, 0.6, 4.4, 4.4], 0),
        ("sequence_mask", [0.6, 0.6, 4.4, 4.4], 0),
    ],
)
def test_importance_weights_by_hand(mode, weights, masked):
    ratios = torch.tensor([0.25, 2.4, 8.0, 0.55], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    none = torch.zeros(4, 0)
    inputs = LossInputs(
        logprobs, none, none.bool(), logprobs.detach() - ratios.log(), advantages, torch.tensor([0, 0, 1, 1]), none, none
    )
    loss, metrics = weighted_loss(inputs, BOUNDS, mode)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(gradient, -advantages * torch.tensor(weights, dtype=torch.float64), atol=1e-12)
    assert float(metrics["sampling/masked_mean"][0]) == masked and metrics["sampling/masked_mean"][1] == 4.0


def test_a_sequence_out_of_bounds_is_masked_or_truncated_whole():
    log_ratio = torch.tensor([2.0, 2.0, 0.1], dtype=torch.float64)  # the first sequence's product is e⁴
    none, zeros = torch.zeros(3, 0), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(zeros, none, none.bool(), -log_ratio, torch.ones(3), torch.tensor([0, 0, 1]), none, none)
    for mode, weight in (("sequence_mask", 0.0), ("sequence_truncate", 5.0)):
        (gradient,) = torch.autograd.grad(weighted_loss(inputs, BOUNDS, mode)[0], zeros)
        np.testing.assert_allclose(gradient, [-weight, -weight, -np.exp(0.1)], atol=1e-12)


def test_weights_of_sequences_are_refused_with_score_centering():
    fields = {"model": "m", "dataset": {"path": "d"}, "importance_sampling": "sequence_mask"}
    with pytest.raises(ValueError, match="set score_centering=false, or importance_sampling=token_truncate or token_mask"):
        GRPOConfig(**fields)
    assert GRPOConfig(**fields, score_centering=False).importance_sampling == "sequence_mask"
