"""Configuration of the trainer core: pydantic models, importable without torch.

A union discriminated on `type` (`TrainerConfigUnion`). Every field's description states unit, range, default and effect;
from it come Prefect's run form, `loopwright config show` and `docs/config.md`. Names are those of `TrainingArguments`
where transformers has the field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainers.config_base import SECTIONS, StrictModel
from trainers.config_distillation import DistillationConfig
from trainers.config_parts import CallableSpec, CollapseConfig
from trainers.config_peft import PeftConfig
from trainers.config_sft import SFTConfig
from trainers.config_trainer import AsyncTrainerConfig, DType, PolicyLossConfig, TrainerConfig

__all__ = [
    "SECTIONS",
    "AsyncTrainerConfig",
    "DType",
    "DistillationConfig",
    "GRPOConfig",
    "PeftConfig",
    "PolicyLossConfig",
    "SFTConfig",
    "StrictModel",
    "TrainerConfig",
    "TrainerConfigUnion",
]


class GRPOConfig(PolicyLossConfig):
    """Asynchronous group-relative policy optimisation (arXiv:2402.03300)."""

    type: Literal["grpo"] = Field("grpo", description="Algorithm.")
    reward_funcs: list[CallableSpec] = Field(
        default_factory=list,
        description="Reward functions, by import path; at least one, unless an environment or `loop_cls` gives the rewards.",
    )
    reward_weights: list[float] | None = Field(None, description="Weight of each reward function. None: all 1.")
    reward_collapse: CollapseConfig | None = Field(
        None, description="End the run as diverged when the reward falls for good. Default none: never."
    )
    num_generations: int = Field(8, ge=2, description="Rollouts per prompt (the group). Default 8.")
    tools: list[CallableSpec] = Field(
        default_factory=list,
        description="Functions the model may call by their `__name__`; import paths. Default none.",
    )
    environment_factory: CallableSpec | None = Field(
        None, description="Makes the environment of one rollout: its public methods are tools. Default none."
    )
    max_tool_calling_iterations: int | None = Field(
        None, ge=1, description="Most times a rollout may call tools and go on. None: as often as its tokens allow."
    )
    fork_threshold_tokens: int = Field(
        1024,
        ge=1,
        description="A turn whose history re-tokenizes differently by fewer tokens is mended, else a new sequence begins.",
    )

    @model_validator(mode="after")
    def _weights_match(self) -> GRPOConfig:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} values for {len(self.reward_funcs)} reward functions: one each"
            )
        return self


TrainerConfigUnion = Annotated[GRPOConfig | DistillationConfig | SFTConfig, Field(discriminator="type")]
