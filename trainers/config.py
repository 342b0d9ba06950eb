"""Configuration of the trainer core: pydantic models, importable without torch.

A union discriminated on `type` (`TrainerConfigUnion`). Every field's description states unit, range, default and effect;
from it come Prefect's run form, `loopwright config show` and `docs/config.md`. Names are those of `TrainingArguments`
where transformers has the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainers.config_base import SECTIONS, StrictModel
from trainers.config_distillation import DistillationConfig
from trainers.config_parts import CallableSpec, CollapseConfig
from trainers.config_peft import PeftConfig
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


class SFTConfig(TrainerConfig):
    """Supervised fine-tuning: a dataset row is a finished rollout."""

    type: Literal["sft"] = Field("sft", description="Algorithm.")
    max_length: int = Field(
        1024, ge=2, description="Longest sequence in tokens; longer rows are dropped and counted. Default 1024."
    )
    learning_rate: float = Field(2e-5, ge=0, description="Peak learning rate. Default 2e-5.")
    rope_parameters: dict[str, Any] | None = Field(
        None,
        description="Rotary scaling for sequences beyond the window the model was trained on, as "
        "`{rope_type: yarn, factor: auto}`; the base and the trained window are read from the model. Default: the model's own.",
    )


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
