"""Supervised fine-tuning: next-token negative log-likelihood over recorded completions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.algorithms import GenerationRequest, LossInputs, LossOutput, SamplerNeeds
from trainers.algorithms.sequences import group_samples
from trainers.config import SFTConfig
from trainers.types import Prompt, RolloutGroup, Sample


class SFT:
    """A dataset row is a finished rollout: prompt tokens are context, completion tokens are trained."""

    objective = "sft"
    generates = False

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def sampler_needs(self) -> SamplerNeeds:
        return SamplerNeeds()

    def requests(self, prompt: Prompt) -> list[GenerationRequest]:
        """Nothing is generated."""
        return []

    def advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [G], all 0: the objective has no rewards."""
        return np.zeros(len(group.rollouts), np.float32)

    def keep(self, group: RolloutGroup) -> str | None:
        return None

    def samples(self, group: RolloutGroup) -> list[Sample]:
        return group_samples(group)

    def step(self, samples: Sequence[Sample]) -> None:
        """Samples are independent."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """−log π of the trained tokens, summed; divided by the step's trained tokens."""
        count = float(inputs.logprobs.numel())
        return LossOutput(
            [(-inputs.logprobs.sum(), "tokens")],
            {"entropy": (inputs.entropy.sum(), count), "token_accuracy": (inputs.argmax_hit.sum(), count)},
        )
