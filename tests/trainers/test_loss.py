"""The chunked head against dense softmax, and the step's gradient against the full batch's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.support.fake_source import make_samples
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from trainers.algorithms import build_algorithm
from trainers.batch import PackedBatch
from trainers.config import SFTConfig
from trainers.head import token_logprobs
from trainers.losses import loss_inputs, normalise
from trainers.packing import pack_step
from trainers.types import StepPlan

CPU = torch.device("cpu")


def dense(hidden, weight, bias, targets, temperature, softcap):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy, logits.argmax(-1) == targets


def head_inputs(terms: int = 7, bias: bool = False):
    generator = torch.Generator().manual_seed(terms)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    targets = torch.randint(0, 11, (terms,), generator=generator)
    return draw(terms, 5), draw(11, 5), draw(11) if bias else None, targets


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("bias", "softcap", "temperature"), [(False, None, 1.0), (True, 3.0, 0.7), (True, None, 1.3)])
def test_head_equals_dense_softmax_in_value_and_gradient(chunk, bias, softcap, temperature):
    hidden, weight, offset, targets = head_inputs(bias=bias)
    ours = token_logprobs(hidden, weight, targets, bias=offset, temperature=temperature, softcap=softcap, chunk=chunk)
    theirs = dense(hidden, weight, offset, targets, temperature, softcap)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    scale = torch.arange(1.0, 8.0, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours[0] * scale).sum(), leaves),
        torch.autograd.grad((theirs[0] * scale).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_head_on_no_terms_keeps_the_graph():
    hidden, weight, _, _ = head_inputs(1)
    logprobs, entropy, hit = token_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.long))
    grads = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert len(logprobs) == len(entropy) == len(hit) == 0 and all(not grad.any() for grad in grads)


def test_entropy_is_finite_where_probabilities_underflow():
    hidden = torch.tensor([[1e4]])
    weight = torch.tensor([[1.0], [-1.0]])
    logprobs, entropy, _ = token_logprobs(hidden, weight, torch.tensor([0]))
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)


def step_gradients(policy, algorithm, plan: StepPlan, samples):
    """Gradients summed over every cell of the plan, as micro-batches and ranks sum them."""
    policy = copy.deepcopy(policy)
    step = pack_step(1, plan, samples, {})
    ranks = len(plan.rows[0])
    for row in (row for micro in step.rows for row in micro):
        batch = PackedBatch.from_row(row, CPU, torch.float64)
        outputs = policy(batch)
        loss = normalise(algorithm.loss(loss_inputs(outputs, batch)), step.totals, ranks) if batch.terms else outputs[0].sum()
        loss.backward()
    return {name: parameter.grad.numpy() for name, parameter in policy.model.named_parameters()}


LAYOUTS = {
    "two micro-batches": [[[0, 1, 2]], [[3, 4]]],
    "ragged over two ranks": [[[0], [1, 2, 3]], [[4], []]],
    "an empty micro-batch": [[[4, 3, 2, 1, 0]], [[]]],
    "one sample a row": [[[0], [1]], [[2], [3]], [[4], []]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [grpo_config(), SFTConfig(model="m", dataset={"path": "d"})],
    ids=["grpo", "sft"],  # type: ignore[arg-type]
)
def test_accumulated_and_summed_gradients_equal_the_full_batchs(config, layout):
    samples = make_samples(seed=3, step=1, count=5)
    assert len({sample.trained_tokens for sample in samples}) > 2, "the micro-batches must be ragged"
    policy = tiny_policy(grpo_config(gradient_checkpointing=False), torch.float64, ONE_RANK)
    algorithm = build_algorithm(config)
    full = step_gradients(policy, algorithm, StepPlan([[[0, 1, 2, 3, 4]]]), samples)
    split = step_gradients(policy, algorithm, StepPlan(LAYOUTS[layout]), samples)
    for name, gradient in full.items():
        np.testing.assert_allclose(split[name], gradient, atol=1e-12, err_msg=name)
    assert max(abs(gradient).max() for gradient in full.values()) > 1e-3
