"""The config of the flow `evaluate`: what is measured, on what, by what."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from flows.config import RetryConfig, TrackingConfig
from flows.config_servers import ServerConfig
from trainers.config import DType, StrictModel
from trainers.config_base import number_fields
from trainers.config_parts import CallableSpec, DatasetConfig


class EvaluateConfig(StrictModel):
    """Greedy accuracy of a run's checkpoint, or of a model, on a held-out set."""

    model_config = ConfigDict(json_schema_extra=number_fields)

    name: str | None = Field(default=None, description="Name of the evaluation in MLflow. Default: made of what is measured.")
    run: str | None = Field(
        default=None, description="Run whose checkpoint is measured, by name or id; it may be training. Or give `model`."
    )
    step: int | None = Field(default=None, ge=1, description="With `run`: step of the checkpoint. Default: the newest.")
    model: str | None = Field(
        default=None, description="Folder with a model, an adapter or a checkpoint, or a hub id. Or give `run`."
    )
    dataset: DatasetConfig | None = Field(default=None, description="The held-out set. Default: the `eval.dataset` of the run.")
    reward_func: CallableSpec | None = Field(
        default=None, description="Scores a completion; accuracy is the mean. Default: what the run is evaluated by."
    )
    max_completion_length: int | None = Field(
        default=None, ge=1, description="Tokens per completion. Default: the run's; without a run 512."
    )
    server: ServerConfig | None = Field(
        default=None, description="With `model`: a server that serves it, by `url`. Default none: it is loaded here."
    )
    dtype: DType = Field(default="float32", description="With `model`: type of the weights on CPU. Default float32.")
    trust_remote_code: bool = Field(default=False, description="Run Python code shipped with the model. Default false.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="With `model`: extra arguments of `apply_chat_template`. Default none."
    )
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow. With `run`: where that is tracked.")
    retry: RetryConfig = Field(default_factory=RetryConfig, description="How often it is repeated, by class of its failure.")

    @model_validator(mode="after")
    def _says_what(self) -> EvaluateConfig:
        if (self.run is None) == (self.model is None):
            raise ValueError("what is measured is either `run`, a run's checkpoint, or `model`: give one of the two")
        if self.run is None:
            for field in ("dataset", "reward_func"):
                if getattr(self, field) is None:
                    raise ValueError(f"`{field}` is required with `model`: there is no run to take it from")
            if self.step is not None:
                raise ValueError("`step` is of a run's checkpoint: give `run`, or the checkpoint's folder as `model`")
        elif self.server is not None:
            raise ValueError("`server` goes with `model`: a run's checkpoint is loaded here, whatever its servers hold by now")
        if self.server is not None and self.server.url is None:
            raise ValueError("server.url is missing: evaluate asks a server that is up (`loopwright serve`, flow `serve`)")
        return self
