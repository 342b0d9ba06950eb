"""The sparse divergence against dense ones, against TRL's own functions, and at the edges of what can come in."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.divergence import sparse_jsd

BETAS = [0.0, 0.3, 0.9, 1.0]
VOCABULARY = 7


def distributions(rows: int = 5, seed: int = 0, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Student's logits, which ask for a gradient, and the teacher's log-probabilities; float64 [rows, V]."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, rows, VOCABULARY, generator=generator, dtype=torch.float64) * scale
    return student.requires_grad_(), teacher.log_softmax(-1)


def dense_jsd(p_s: torch.Tensor, p_t: torch.Tensor, beta: float) -> torch.Tensor:
    """[N], by the definition, of whole distributions."""
    if beta == 0:
        return (p_t * (p_t / p_s).log()).sum(-1)
    if beta == 1:
        return (p_s * (p_s / p_t).log()).sum(-1)
    middle = (1 - beta) * p_s + beta * p_t
    return beta * (p_t * (p_t / middle).log()).sum(-1) + (1 - beta) * (p_s * (p_s / middle).log()).sum(-1)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_over_the_whole_vocabulary_it_is_the_dense_divergence(beta: float, tail: bool) -> None:
    logits, teacher = distributions()
    order = torch.tensor([3, 0, 6, 5, 1, 2, 4])  # the realised token first, as in a row
    sparse = sparse_jsd(logits.log_softmax(-1)[:, order], teacher[:, order], beta, tail)
    dense = dense_jsd(logits.softmax(-1), teacher.exp(), beta)
    torch.testing.assert_close(sparse.jsd, dense, rtol=0, atol=1e-10)
    torch.testing.assert_close(sparse.teacher_entropy, -(teacher.exp() * teacher).sum(-1), rtol=0, atol=1e-5)
    slopes = [torch.autograd.grad(jsd.sum(), logits, retain_graph=True)[0] for jsd in (sparse.jsd, dense)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_over_a_few_tokens_it_is_the_dense_divergence_of_the_coarsened_distributions(beta: float, tail: bool) -> None:
    logits, teacher = distributions(seed=1)
    support = torch.tensor([4, 1])
    known = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, support, True)

    def coarse(p: torch.Tensor) -> torch.Tensor:
        return (
            torch.cat([p[:, support], p[:, ~known].sum(-1, keepdim=True)], -1)
            if tail
            else p[:, support] / p[:, known].sum(-1, keepdim=True)
        )

    sparse = sparse_jsd(logits.log_softmax(-1)[:, support], teacher[:, support], beta, tail)
    p_t = coarse(teacher.exp())
    dense = dense_jsd(coarse(logits.softmax(-1)), p_t, beta)
    torch.testing.assert_close(sparse.jsd, dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(sparse.teacher_entropy, -(p_t * p_t.log()).sum(-1), rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(jsd.sum(), logits, retain_graph=True)[0] for jsd in (sparse.jsd, dense)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_one_side_does_not_know_belongs_to_the_rest(beta: float) -> None:
    logits, teacher = distributions(seed=2)
    student = logits.log_softmax(-1)
    expected = sparse_jsd(student[:, [0, 3]], teacher[:, [0, 3]], beta, True)
    blind = teacher[:, [0, 3, 5]].clone()
    blind[:, 2] = -math.inf
    deaf = student[:, [0, 3, 5]].masked_fill(torch.tensor([False, False, True]), -math.inf)
    for got in (sparse_jsd(student[:, [0, 3, 5]], blind, beta, True), sparse_jsd(deaf, teacher[:, [0, 3, 5]], beta, True)):
        torch.testing.assert_close(got.jsd, expected.jsd, rtol=0, atol=1e-12)
        torch.testing.assert_close(got.teacher_entropy, expected.teacher_entropy, rtol=0, atol=1e-12)


ALL, SOME = [0.0, -math.inf, -math.inf], [-0.7, -0.9, -2.5]
NONE = [-math.inf] * 3
TINY = [-1e-30, -200.0, -1e4]  # exp underflows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_finite_whatever_comes_in(beta: float, tail: bool, dtype: torch.dtype) -> None:
    rows = [ALL, SOME, NONE, TINY, [0.0, 0.0, 0.0]]
    student = torch.tensor([row for row in rows for _ in rows], dtype=dtype, requires_grad=True)
    teacher = torch.tensor(rows * len(rows), dtype=dtype)
    divergence = sparse_jsd(student, teacher, beta, tail)
    (slopes,) = torch.autograd.grad(divergence.jsd.sum(), student)
    assert divergence.jsd.isfinite().all() and divergence.teacher_entropy.isfinite().all() and slopes.isfinite().all()


def test_the_tail_of_a_support_that_holds_everything_is_floored() -> None:
    """Teacher at 1/2, student at 1: KL(teacher ‖ student) = ½ log(½ / 1) + ½ log(½ / 1e-7)."""
    student, teacher = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), math.log(0.5), dtype=torch.float64)
    expected = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / -math.expm1(-1e-7))
    assert sparse_jsd(student, teacher, 0.0, True).jsd.item() == pytest.approx(expected, abs=1e-12)
    assert sparse_jsd(student, teacher, 0.0, False).jsd.item() == 0.0
