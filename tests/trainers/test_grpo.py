"""GRPO against hand-computed advantages and against TRL's own loss function."""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from trainers.algorithms import LossInputs
from trainers.algorithms.grpo import GRPO
from trainers.config import GRPOConfig
from trainers.rollouts.reconcile import reconcile
from trainers.types import Prompt, Rollout, RolloutGroup, TurnRecord, VersionSpan

NAN = float("nan")


def config(**fields: Any) -> GRPOConfig:
    return GRPOConfig(model="m", dataset={"path": "d.jsonl"}, **fields)  # type: ignore[arg-type]


def reconciled(rollout: Rollout) -> Rollout:
    rollout.reconciled = reconcile(rollout.turns, 1024)
    return rollout


def group(rewards: list[float], outputs: int = 3) -> RolloutGroup:
    prompt = Prompt(0, 4, [], {}, np.array([5, 9], np.int32))
    turn = TurnRecord(
        np.array([5, 9], np.int32),
        np.arange(outputs, dtype=np.int32),
        np.full(outputs, -0.5, np.float32),
        [VersionSpan(0, 1, 2), VersionSpan(1, outputs, 3)],
        "stop",
    )
    return RolloutGroup(prompt, [reconciled(Rollout(prompt, [turn], reward=reward)) for reward in rewards])


@pytest.mark.parametrize(
    ("rewards", "expected", "dropped"),
    [
        # mean 0.5, population deviation 0.5
        ([1.0, 0.0, 1.0, 0.0], [1.0, -1.0, 1.0, -1.0], None),
        # scorable 2, 0, 1: mean 1, deviation sqrt(2/3); the unscorable one is left out of both and gets 0
        ([2.0, NAN, 0.0, 1.0], [1.224744871, 0.0, -1.224744871, 0.0], None),
        ([0.7, 0.7, 0.7, 0.7], [0.0, 0.0, 0.0, 0.0], "zero_variance"),
        ([1.0, NAN, NAN, NAN], [0.0, 0.0, 0.0, 0.0], "zero_variance"),
        ([NAN, NAN, NAN, NAN], [0.0, 0.0, 0.0, 0.0], "zero_variance"),
    ],
)
def test_advantages_and_drops_equal_a_hand_computed_table(rewards, expected, dropped):
    algorithm = GRPO(config(num_generations=4))
    np.testing.assert_allclose(algorithm.advantages(group(rewards)), expected, atol=1e-6)
    assert algorithm.keep(group(rewards)) == dropped


def test_requests_ask_for_the_group_at_the_runs_temperature():
    requests = GRPO(config(num_generations=3, temperature=0.7, max_completion_length=11)).requests(group([1.0]).prompt)
    assert [(r.temperature, r.max_tokens) for r in requests] == [(0.7, 11)] * 3


def test_samples_carry_mask_logprobs_advantage_and_version_span():
    made = group([1.0, 0.0])
    made.advantages = np.array([1.0, -1.0], np.float32)
    first, second = GRPO(config()).samples(made)
    assert first.token_ids.tolist() == [5, 9, 0, 1, 2]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    np.testing.assert_allclose(first.sampler_logprobs, [0, 0, -0.5, -0.5, -0.5])
    assert (first.advantage, second.advantage, first.version_min, first.group) == (1.0, -1.0, 2, "0:4")


def test_an_empty_completion_gives_no_sample():
    made = group([1.0], outputs=0)
    made.advantages = np.ones(1, np.float32)
    assert GRPO(config()).samples(made) == []


def test_turns_that_continue_make_one_sample_and_a_rewritten_prompt_forks():
    def turn(prompt: list[int], output: list[int]) -> TurnRecord:
        span = VersionSpan(0, len(output), 0)
        return TurnRecord(
            np.array(prompt, np.int32), np.array(output, np.int32), np.zeros(len(output), np.float32), [span], "stop"
        )

    made = group([1.0])
    made.rollouts[0].turns = [turn([1], [2, 3]), turn([1, 2, 3, 4], [5]), turn([1, 9], [6])]
    reconciled(made.rollouts[0])
    made.advantages = np.ones(1, np.float32)
    samples = GRPO(config()).samples(made)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4, 5], [1, 9, 6]]
    assert [s.loss_mask.tolist() for s in samples] == [[False, True, True, False, True], [False, False, True]]


def tensors(terms: int = 40, seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(terms, generator=generator, dtype=torch.float64) * scale

    sampler = -draw(1.0).abs()
    return LossInputs(
        logprobs=(sampler + draw(0.4)).requires_grad_(),
        entropy=draw(1.0).abs(),
        argmax_hit=draw(1.0) > 0,
        sampler_logprobs=sampler,
        advantages=draw(1.0),
        sequence_index=torch.arange(terms) // 10,
        top_logprobs=torch.zeros(terms, 0),
        other_top_logprobs=torch.zeros(terms, 0),
    )


def test_loss_by_hand():
    """ratio 1.5 is clipped at 1.2 for A > 0 and not for A < 0; ratio 0.5 the other way round."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    inputs = tensors(4)
    inputs.logprobs = (inputs.sampler_logprobs + ratio.log()).detach().requires_grad_()
    inputs.advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    output = GRPO(config(score_centering=False)).loss(inputs)
    (loss, denominator) = output.losses[0]
    assert denominator == "tokens"
    assert loss.item() == pytest.approx(-1.2 + 1.5 - 0.5 + 0.8)
    (grad,) = torch.autograd.grad(loss, inputs.logprobs)
    np.testing.assert_allclose(grad.numpy(), [0, 1.5, -0.5, 0], atol=1e-12)
    values = {name: (n / d).item() if torch.is_tensor(n) else n / d for name, (n, d) in output.metrics.items()}
    assert values["clip_ratio/high_mean"] == values["clip_ratio/low_mean"] == 0.25
    assert values["clip_ratio/region_mean"] == 0.5
    assert values["ratio"] == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("epsilon_high", [None, 0.28])
def test_loss_gradient_and_metrics_agree_with_trl(epsilon_high):
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer as Peer

    inputs = tensors(200)
    terms = inputs.logprobs.numel()
    ours = GRPO(config(epsilon=0.2, epsilon_high=epsilon_high, score_centering=False)).loss(inputs)
    our_loss = ours.losses[0][0] / terms
    (our_grad,) = torch.autograd.grad(our_loss, inputs.logprobs)

    peer = types.SimpleNamespace(
        epsilon_low=0.2,
        epsilon_high=epsilon_high or 0.2,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=types.SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )
    ones = torch.ones(1, terms, dtype=torch.long)
    batch = {
        "attention_mask": ones,
        "token_index": torch.arange(terms).unsqueeze(0),
        "input_ids": ones,
        "position_ids": ones,
        "shift_labels": ones,
        "old_log_probs": inputs.sampler_logprobs.unsqueeze(0),
        "advantages": inputs.advantages.unsqueeze(0),
        "segment_id": inputs.sequence_index.unsqueeze(0),
        "tree_kv_index": ones,
        "tree_cu_seqlens_q": ones,
        "tree_cu_seqlens_k": ones,
        "tree_max_seqlens": torch.ones(1, 2, dtype=torch.long),
        "global_n_tokens": torch.tensor([terms]),
        "global_n_forward_tokens": torch.tensor([terms]),
        "mean_seq_len": torch.tensor([10.0]),
    }
    outputs = types.SimpleNamespace(log_probs=inputs.logprobs, entropy=inputs.entropy)
    their_loss = Peer.compute_loss(peer, lambda **kwargs: outputs, batch)  # type: ignore[arg-type]
    (their_grad,) = torch.autograd.grad(their_loss, inputs.logprobs)

    assert our_loss.item() == pytest.approx(their_loss.item(), abs=1e-6)
    np.testing.assert_allclose(our_grad.numpy(), their_grad.numpy(), atol=1e-9)
    for name in ("ratio", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        numerator, denominator = ours.metrics[name]
        assert float(numerator / denominator) == pytest.approx(peer._metrics["train"][name][0], abs=1e-6), name
