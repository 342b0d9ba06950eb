"""Group-relative policy optimisation (arXiv:2402.03300), token-level normalisation, no reference model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.algorithms import GenerationRequest, LossInputs, LossOutput, SamplerNeeds
from trainers.algorithms.sequences import group_samples
from trainers.config import GRPOConfig
from trainers.types import Prompt, RolloutGroup, Sample


class GRPO:
    """Advantage (R − mean) / (population std + 1e-8) over the group's scorable rollouts; clipped ratio, scores centered."""

    objective = "grpo"
    generates = True

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config

    def sampler_needs(self) -> SamplerNeeds:
        return SamplerNeeds(self.config.sampler_tops, self.config.restricts_sampling)

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
        """The policy loss of the config; divided by the step's trained tokens."""
        from trainers.policy_losses import policy_loss

        loss, metrics = policy_loss(inputs, self.config)
        return LossOutput([(loss, "tokens")], metrics)
