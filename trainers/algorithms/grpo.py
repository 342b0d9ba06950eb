"""Group-relative policy optimisation (arXiv:2402.03300), token-level normalisation, no reference model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.algorithms import GenerationRequest, LossInputs, LossOutput
from trainers.algorithms.sequences import group_samples
from trainers.config import GRPOConfig
from trainers.types import Prompt, RolloutGroup, Sample


class GRPO:
    """Advantage (R − mean) / (population std + 1e-8) over the group's scorable rollouts; clipped importance ratio."""

    name = "grpo"
    generates = True

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.low = 1 - config.epsilon
        self.high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)

    def requests(self, prompt: Prompt) -> list[GenerationRequest]:
        return [GenerationRequest(self.config.temperature, self.config.max_completion_length)] * self.config.num_generations

    def advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [G]; an unscorable rollout (NaN reward) gets 0 and is left out of mean and deviation."""
        rewards = group.rewards
        scored = ~np.isnan(rewards)
        advantages = np.zeros(len(rewards), np.float32)
        if scored.any():
            values = rewards[scored]
            advantages[scored] = (values - values.mean()) / (values.std() + 1e-8)
        return advantages

    def keep(self, group: RolloutGroup) -> str | None:
        """A group whose scorable rewards do not differ has no gradient."""
        scored = group.rewards[~np.isnan(group.rewards)]
        return "zero_variance" if len(scored) < 2 or scored.max() == scored.min() else None

    def samples(self, group: RolloutGroup) -> list[Sample]:
        return group_samples(group)

    def step(self, samples: Sequence[Sample]) -> None:
        """Advantages are final within their group."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """−min(r A, clip(r, 1−ε, 1+ε_high) A), summed; divided by the step's trained tokens."""
        import torch

        advantages = inputs.advantages
        log_ratio = inputs.logprobs - inputs.sampler_logprobs
        ratio = log_ratio.exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(self.low, self.high) * advantages).sum()

        with torch.no_grad():
            count = float(ratio.numel())
            low = ((ratio < self.low) & (advantages < 0)).sum()
            high = ((ratio > self.high) & (advantages > 0)).sum()
            metrics: dict[str, tuple[torch.Tensor, torch.Tensor | float]] = {
                "ratio": (ratio.sum(), count),
                "kl": (((ratio - 1) - log_ratio).sum(), count),
                "entropy": (inputs.entropy.sum(), count),
                "clip_ratio/low_mean": (low, count),
                "clip_ratio/high_mean": (high, count),
                "clip_ratio/region_mean": (low + high, count),
                "clip_ratio/low_min": (low / max(count, 1), 1.0),
                "clip_ratio/high_max": (high / max(count, 1), 1.0),
            }
        return LossOutput([(loss, "tokens")], metrics)
