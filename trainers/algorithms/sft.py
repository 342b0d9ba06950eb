"""Supervised fine-tuning: next-token negative log-likelihood over recorded sequences, or DFT (arXiv:2508.05629)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.algorithms import GenerationRequest, LossInputs, LossOutput, SamplerNeeds
from trainers.algorithms.sequences import group_samples
from trainers.config import SFTConfig
from trainers.types import Prompt, RolloutGroup, Sample


class SFT:
    """A dataset row is a finished rollout; which of its tokens are trained, `trainers.recorded` says."""

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
        """−w log π of the trained tokens, summed; divided by the step's trained tokens.

        w is 1, or for `dft` π itself, taken as a constant: the gradient of a token is then that of −π.
        """
        from trainers.position_loss import loss_by_position  # the rollout process makes no tensors

        count = float(inputs.logprobs.numel())
        nll = -inputs.logprobs
        loss = nll * inputs.logprobs.detach().exp() if self.config.loss_type == "dft" else nll
        return LossOutput(
            [(loss.sum(), "tokens")],
            {
                "entropy": (inputs.entropy.sum(), count),
                "token_accuracy": (inputs.argmax_hit.sum(), count),
                **loss_by_position(nll.detach(), inputs.positions, self.config.max_length),
            },
        )
