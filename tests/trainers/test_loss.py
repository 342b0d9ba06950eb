"""The step's gradient, however its samples are laid out, against the full batch's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.support.fake_source import make_samples, taught
from tests.support.policies import ONE_RANK, distillation_config, grpo_config, tiny_policy
from trainers.algorithms import build_algorithm
from trainers.batch import PackedBatch
from trainers.config import SFTConfig
from trainers.losses import loss_inputs, normalise
from trainers.packing import pack_row, pack_step
from trainers.types import StepPlan

CPU = torch.device("cpu")


def step_gradients(policy, algorithm, plan: StepPlan, samples):
    """Gradients summed over every cell of the plan, as micro-batches and ranks sum them."""
    policy = copy.deepcopy(policy)
    algorithm.step(samples)
    step = pack_step(1, plan, samples, {}, algorithm.config.teachers)
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
    [
        grpo_config(),
        grpo_config(score_centering=False),
        SFTConfig(model="m", dataset={"path": "d"}),  # type: ignore[arg-type]
        distillation_config(teacher_balance=True),
        distillation_config(beta=0.5, add_tail_bucket=False),
        distillation_config(loss="policy_gradient", score_centering=True),
    ],
    ids=["grpo", "grpo, not centered", "sft", "jsd, balanced", "jsd between, no tail", "policy gradient"],
)
def test_accumulated_and_summed_gradients_equal_the_full_batchs(config, layout):
    samples = make_samples(seed=3, step=1, count=5)
    if config.teachers:
        taught(samples, 3, config.teachers, top_k=3 * (config.loss == "jsd"))
    assert len({sample.trained_tokens for sample in samples}) > 2, "the micro-batches must be ragged"
    policy = tiny_policy(grpo_config(gradient_checkpointing=False), torch.float64, ONE_RANK)
    algorithm = build_algorithm(config)
    full = step_gradients(policy, algorithm, StepPlan([[[0, 1, 2, 3, 4]]]), samples)
    split = step_gradients(policy, algorithm, StepPlan(LAYOUTS[layout]), samples)
    for name, gradient in full.items():
        np.testing.assert_allclose(split[name], gradient, atol=1e-12, err_msg=name)
    assert max(abs(gradient).max() for gradient in full.values()) > 1e-3


def test_an_id_beyond_the_models_own_is_none():
    """A teacher's padded logits have more ids than the student's head."""
    (sample,) = make_samples(seed=3, step=1, count=1)
    assert sample.top_ids is not None
    sample.top_ids[0] = [63, 64, 2000]
    top = tiny_policy()(PackedBatch.from_row(pack_row([sample]), CPU)).top_logprobs
    assert top[0].isfinite().tolist() == [True, False, False] and top[1:].isfinite().all()
