"""The config of the flow `specialise-and-merge`: one base model, its domains, and what the three kinds of stages share.

    FILE ─▶ RecipeConfig ─▶ flows.recipe_plan: the run config of every stage, all of them checked before the first one starts

A stage's fields are those of its run config (docs/config.md). What the recipe knows itself (names, models, where stages are
tracked and stored) is said once, at the top.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from flows.config import ParentRetry, StorageConfig, TrackingConfig
from trainers.config import StrictModel
from trainers.config_base import number_fields
from trainers.config_parts import CallableSpec, DatasetConfig

# A stage's run has the recipe's name and its own, so the recipe's leaves room.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}\Z")
_DOMAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\Z")
# What models are called, besides those of domains; the last two are stages, as domains are.
BASE, SFT, MERGED = "base", "sft", "merged"


class DomainEval(StrictModel):
    """What a domain's accuracy is measured on."""

    dataset: DatasetConfig = Field(description="Held-out problems of the domain.")
    reward_func: CallableSpec | None = Field(
        default=None,
        description="Scores one greedy completion; accuracy is the mean. Default: the domain's first reward function.",
    )
    max_completion_length: int | None = Field(
        default=None, ge=1, description="Tokens per completion. Default: that of the domain's GRPO run."
    )


class DomainConfig(StrictModel):
    """One domain: the prompts of its specialist, and of the student when it is taught by that specialist."""

    dataset: DatasetConfig = Field(description="Prompts. The student is taught on the same ones.")
    reward_funcs: list[CallableSpec] = Field(
        default_factory=list, description="What the specialist is trained for. Default none: `specialist` is there already."
    )
    eval: DomainEval | None = Field(default=None, description="Held-out problems, for the table of accuracies. Default none.")
    specialist: str | None = Field(
        default=None,
        description="A specialist that is there already (folder or hub id), with the model's tokenizer: none is trained. "
        "Default none.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Fields of this specialist's GRPO run, over those of `grpo`. Default none."
    )

    @model_validator(mode="after")
    def _trained_or_there(self) -> DomainConfig:
        if self.specialist is not None:
            if self.overrides:
                raise ValueError(
                    "has `overrides` for the training of a specialist that is there already: leave one of the two out"
                )
            if self.eval is not None and self.eval.reward_func is None and not self.reward_funcs:
                raise ValueError("eval has nothing to score with: set eval.reward_func")
        elif not self.reward_funcs:
            raise ValueError(
                "reward_funcs is empty: name at least one reward function as `package.module:name`, or a `specialist` that is "
                "there already"
            )
        return self


class RecipeConfig(StrictModel):
    """From a base model to a student that has what its specialists have: SFT, a GRPO specialist per domain, MOPD."""

    model_config = ConfigDict(json_schema_extra=number_fields)

    name: str | None = Field(
        default=None,
        description="Name of the recipe, unique among runs; the same name again resumes. Its stages' runs are <name>-sft, "
        "<name>-<domain> and <name>-merged. Default: made up.",
    )
    model: str = Field(description="Base model: a folder, a packaged model or a hub id.")
    domains: dict[str, DomainConfig] = Field(
        min_length=2, description="Domains by name; the name is also that of the teacher, and the `teacher_id` of its prompts."
    )
    shared: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the run configs of all stages, such as dtype and seed. Default none."
    )
    sft: dict[str, Any] | None = Field(
        default=None,
        description="Fields of the supervised run, its `dataset` among them. Default none: `model` is the checkpoint that "
        "specialists begin from.",
    )
    grpo: dict[str, Any] = Field(default_factory=dict, description="Fields of every specialist's GRPO run. Default none.")
    merge: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the distillation run. `servers.teachers.<domain>` may say how a teacher is served; its model "
        "is filled in. Default none.",
    )
    parallel: int | None = Field(
        default=None,
        ge=1,
        description="Specialists trained at the same time, as far as GPUs are free. Default: all with GPUs, one without.",
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the MLflow runs. Default none.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow, of the recipe and its stages.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Checkpoints of the stages.")
    retry: ParentRetry = Field(default_factory=ParentRetry, description="Stages that were lost, and the recipe itself.")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.match(name):
            raise ValueError(
                "a recipe's name has letters, digits, `_`, `-` and `.`, starts with a letter or digit, and has at most 80"
            )
        return name

    @field_validator("domains")
    @classmethod
    def _told_apart(cls, domains: dict[str, DomainConfig]) -> dict[str, DomainConfig]:
        for name in domains:
            if not _DOMAIN.match(name):
                raise ValueError(f"{name!r} cannot name a domain: letters, digits, `_`, `-` and `.`, at most 32")
            if name in (BASE, SFT, MERGED):
                raise ValueError(f"{name!r} is what another model of the recipe is called: give the domain another name")
        return domains
