"""The chunked head against dense softmax: log-probabilities, those of further ids, candidate sets, gradients."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from trainers.head import Candidates, token_logprobs

TERMS, HIDDEN, VOCABULARY = 7, 5, 11
FORMS = [(False, None, 1.0), (True, 3.0, 0.7), (True, None, 1.3)]
SETS = [[0, 3, 9], [], [2], [1, 4, 5, 6, 7], [], [8, 10], [0, 1, 2]]  # empty: the whole vocabulary


def dense(hidden, weight, bias, targets, temperature, softcap, top_ids, sets):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    for term, ids in enumerate(sets):
        if ids:
            outside = torch.tensor([i not in ids for i in range(VOCABULARY)])
            logits = torch.where(outside & (torch.arange(len(logits)) == term)[:, None], -torch.inf, logits)
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -torch.where(logprobs.isinf(), 0.0, logprobs.exp() * logprobs).sum(-1)
    top = torch.where(top_ids < 0, -torch.inf, logprobs.gather(-1, top_ids.clamp_min(0)))
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy, logits.argmax(-1) == targets, top


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def candidates(sets: list[list[int]]) -> Candidates:
    counts = np.array([len(ids) for ids in sets])
    return Candidates(
        ids=torch.tensor([i for ids in sets for i in ids]),
        owner=torch.from_numpy(np.repeat(np.arange(len(sets)), counts)),
        limited=torch.from_numpy(counts > 0),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("bias", "softcap", "temperature"), FORMS)
@pytest.mark.parametrize("sets", [None, SETS], ids=["all", "candidates"])
def test_head_equals_dense_softmax_in_value_and_gradient(chunk, bias, softcap, temperature, sets):
    hidden, weight = draw(TERMS, HIDDEN), draw(VOCABULARY, HIDDEN)
    offset = draw(VOCABULARY) if bias else None
    targets = torch.tensor([ids[-1] if ids else 4 for ids in sets or SETS])
    # The target itself, an id twice, none, and (with candidates) ids outside the set.
    top_ids = torch.tensor([[9, 3, -1], [0, 1, 2], [2, -1, -1], [4, 4, 6], [-1, -1, -1], [8, 10, 0], [5, 6, 1]])
    ours = token_logprobs(
        hidden, weight, targets, bias=offset, temperature=temperature, softcap=softcap, chunk=chunk, top_ids=top_ids,
        candidates=sets and candidates(sets),
    )  # fmt: skip
    theirs = dense(hidden, weight, offset, targets, temperature, softcap, top_ids, sets or [[]] * TERMS)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    scale, top_scale = torch.arange(1.0, 1 + TERMS, dtype=torch.float64), draw(TERMS, 3).detach()

    def total(outputs):
        finite = outputs[3].isfinite()
        return (outputs[0] * scale).sum() + (torch.where(finite, outputs[3], 0.0) * top_scale).sum()

    for a, b in zip(torch.autograd.grad(total(ours), leaves), torch.autograd.grad(total(theirs), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_is_the_difference_quotient():
    hidden, weight, bias = draw(TERMS, HIDDEN), draw(VOCABULARY, HIDDEN), draw(VOCABULARY)
    targets, top_ids = torch.tensor([ids[0] if ids else 1 for ids in SETS]), torch.tensor([ids[:1] or [2] for ids in SETS])

    def outputs(*leaves):
        made = token_logprobs(
            leaves[0], leaves[1], targets, bias=leaves[2], temperature=0.8, softcap=4.0, chunk=2, top_ids=top_ids,
            candidates=candidates(SETS),
        )  # fmt: skip
        return made.logprobs, made.top_logprobs

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


def test_renormalised_probabilities_by_hand():
    """Probabilities 1/8, 2/8, 5/8: among ids 0 and 1 they are 1/3 and 2/3."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [5.0]]).log()
    outputs = token_logprobs(
        hidden, weight, torch.tensor([1, 1]), top_ids=torch.tensor([[0, 2], [0, 2]]), candidates=candidates([[0, 1], []])
    )
    torch.testing.assert_close(outputs.logprobs.exp(), torch.tensor([2 / 3, 1 / 4]))
    torch.testing.assert_close(outputs.top_logprobs.exp(), torch.tensor([[1 / 3, 0.0], [1 / 8, 5 / 8]]))
    assert outputs.argmax_hit.tolist() == [True, False]
    assert outputs.entropy[0].item() == pytest.approx(np.log(3) - 2 / 3 * np.log(2))


def test_a_target_the_server_left_out_of_its_candidates_is_still_finite():
    hidden, weight = draw(1, HIDDEN), draw(VOCABULARY, HIDDEN)
    left_out = token_logprobs(hidden, weight, torch.tensor([3]), candidates=candidates([[4, 5]]))
    named = token_logprobs(hidden, weight, torch.tensor([3]), candidates=candidates([[3, 4, 5]]))
    torch.testing.assert_close(left_out, named)


def test_head_on_no_terms_keeps_the_graph():
    hidden, weight = draw(1, HIDDEN), draw(VOCABULARY, HIDDEN)
    outputs = token_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.long), top_ids=torch.empty(0, 4, dtype=torch.long))
    grads = torch.autograd.grad(outputs.logprobs.sum() + outputs.top_logprobs.sum(), [hidden, weight])
    assert all(len(output) == 0 for output in outputs) and all(not grad.any() for grad in grads)


def test_entropy_is_finite_where_probabilities_underflow():
    hidden = torch.tensor([[1e4]])
    weight = torch.tensor([[1.0], [-1.0]])
    outputs = token_logprobs(hidden, weight, torch.tensor([0]))
    assert (outputs.logprobs.item(), outputs.entropy.item()) == (0.0, 0.0)


def test_the_kernels_of_a_gpu_compute_the_same():
    """Interpreted, in a process of its own: triton decides at its import."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fused_head"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr
