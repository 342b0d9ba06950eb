"""The `Algorithm` seam: everything the loop and the engine do not know about an objective.

One algorithm, one file. The first group of methods runs in the rollout process (NumPy, no torch), `loss` in the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from trainers.types import Prompt, RolloutGroup, Sample

if TYPE_CHECKING:
    import torch

    from trainers.config import TrainerConfig

Denominator = Literal["tokens", "sequences", "ranks"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One rollout to generate: `temperature` 0 means greedy."""

    temperature: float
    max_tokens: int


class SamplerNeeds(NamedTuple):
    """What an objective must know of the sampler beside the sampled tokens' log-probabilities."""

    top_logprobs: int = 0  # its K most likely tokens at every position; 0: none
    candidates: bool = False  # the ids that every token was sampled among


@dataclass(slots=True)
class LossInputs:
    """Per-term tensors of one row; all have shape [N] unless said.

    `logprobs` and `top_logprobs` (natural log at the sampling temperature, over the candidate set where there is one) carry the
    gradient; `entropy` and `argmax_hit` are detached unless an objective needs them.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    argmax_hit: torch.Tensor  # bool, the target is the most likely token
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_index: torch.Tensor  # int64
    top_logprobs: torch.Tensor  # [N, K], the policy's, of the ids that the objective asked for
    other_top_logprobs: torch.Tensor  # [N, K], of the same ids, the sampler's or the teacher's; −inf: none
    teacher_logprobs: torch.Tensor | None = None  # of the targets; empty if no sample of the row has a teacher
    teacher_index: torch.Tensor | None = None  # int64, which of the config's teachers, −1: none; empty likewise
    positions: torch.Tensor | None = None  # int64, of the target within its sequence; None: there are no terms


@dataclass(slots=True)
class LossOutput:
    """`losses`: sums over this row, each with the whole-step count that divides it. `metrics`: (numerator, denominator)."""

    losses: list[tuple[torch.Tensor, Denominator]]
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor | float]] = field(default_factory=dict)


class Algorithm(Protocol):
    """An objective. Constructed from its config in both processes."""

    objective: str  # with all that says what samples' optional fields are; those kept for another one are not trained
    generates: bool  # False: a dataset row is a finished rollout

    def __init__(self, config: Any) -> None: ...
    def sampler_needs(self) -> SamplerNeeds: ...
    def requests(self, prompt: Prompt) -> list[GenerationRequest]: ...
    def advantages(self, group: RolloutGroup) -> Any: ...
    def keep(self, group: RolloutGroup) -> str | None:
        """None to keep the group, else the cause it is dropped for (a `rollout/dropped_groups_total/<cause>`)."""
        ...

    def samples(self, group: RolloutGroup) -> list[Sample]: ...
    def step(self, samples: Sequence[Sample]) -> None:
        """Whole-step work on the samples about to be trained, in place (whitening); most do nothing."""
        ...

    def loss(self, inputs: LossInputs) -> LossOutput: ...


def build_algorithm(config: TrainerConfig) -> Algorithm:
    """The algorithm of a config's `type`."""
    from trainers.algorithms.distillation import Distillation
    from trainers.algorithms.grpo import GRPO
    from trainers.algorithms.sft import SFT

    return {"grpo": GRPO, "distillation": Distillation, "sft": SFT}[config.type](config)  # type: ignore[attr-defined]
