"""Parts of a trainer's configuration: data, functions by import path, evaluation, and when a reward counts as collapsed."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from trainers.config_base import StrictModel


class CallableSpec(StrictModel):
    """A function or class by import path, with arguments bound to it."""

    path: str = Field(description="Import path `package.module:name`, or `file.py:name` relative to the working folder.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments bound at start; default none.")

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str) else data


class DatasetConfig(StrictModel):
    """Where prompts come from and which columns they have."""

    path: str = Field(
        description="A .jsonl, .json or .parquet file, a folder written by `datasets.save_to_disk`, or a hub id; for `books` "
        "also a folder of .txt files."
    )
    split: str = Field("train", description="Split of a hub dataset; ignored for a single file. Default train.")
    prompt_column: str = Field(
        "prompt", description="Column with the prompt: a list of chat messages, or a string (one user message). Default prompt."
    )
    completion_column: str = Field(
        "completion", description="SFT only: column with the target completion (messages or a string). Default completion."
    )
    messages_column: str | None = Field(
        None,
        description="SFT only: column with whole conversations, in place of prompt and completion; every token but the first "
        "is trained, or with `assistant_only_loss` what the assistant says. Default none.",
    )
    system_prompt: str | None = Field(None, description="System message put before every prompt. Default none.")
    streaming: bool = Field(
        False,
        description="Read the data as a stream (`datasets.IterableDataset`): never whole in memory, in its order: `shuffle` "
        "does not apply. `num_train_epochs` must be whole then. Default false.",
    )
    max_rows: int | None = Field(None, ge=1, description="Use only the first this many rows. Default all.")


class EvalConfig(StrictModel):
    """Greedy evaluation on a held-out set, scored by the run's reward functions or by `reward_func`."""

    dataset: DatasetConfig
    reward_func: CallableSpec | None = Field(
        None, description="Scores one completion; accuracy is the mean. Default: the first of the run's reward functions."
    )
    every: int = Field(
        0, ge=0, description="Evaluate every this many optimizer steps. 0 (default): before and after training only."
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="Stop once this many evaluations in a row brought no better accuracy; needs `every`. Default none: never.",
    )
    max_completion_length: int | None = Field(None, ge=1, description="Tokens per completion. Default: the run's value.")

    @field_validator("dataset")
    @classmethod
    def _read_whole(cls, dataset: DatasetConfig) -> DatasetConfig:
        if dataset.streaming:
            raise ValueError("a held-out set is read whole: leave `streaming` out, and bound a large one by `max_rows`")
        return dataset

    @model_validator(mode="after")
    def _patience_has_evaluations(self) -> EvalConfig:
        if self.patience is not None and not self.every:
            raise ValueError("patience counts evaluations during training: set `every` to the steps between two of them")
        return self


class CollapseConfig(StrictModel):
    """When a falling reward ends the run as diverged: it was at least `above`, and then below `below` for `steps` steps."""

    above: float = Field(description="Mean reward that the run must have reached before the rule counts.")
    below: float = Field(description="Mean reward under which a step counts as collapsed; at most `above`.")
    steps: int = Field(default=50, ge=1, description="Steps in a row below it that end the run. Default 50.")

    @model_validator(mode="after")
    def _below_is_lower(self) -> CollapseConfig:
        if self.below > self.above:
            raise ValueError(
                f"below={self.below:g} is more than above={self.above:g}: a reward that was reached must be left again"
            )
        return self
