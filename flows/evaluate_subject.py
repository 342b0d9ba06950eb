"""What an evaluation measures: the checkpoint, adapter or model that its config names. No Prefect: the command asks first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.config import RUN_CONFIGS, RunConfig, resolve_plain, trainer_fields
from flows.convert import resolve_model
from flows.evaluate_config import EvaluateConfig
from flows.runs import config_of
from infra.home import home
from infra.registry import Registry, RunRow
from trainers.errors import ConfigError
from trainers.references import resolve

DEFAULT_TOKENS = 512


@dataclass(frozen=True)
class Subject:
    """What is measured. `step` 0: a model of no run."""

    fields: dict[str, Any]  # the trainer's, with `eval`
    model: str
    step: int
    run: RunRow | None
    uri: str | None
    experiment: str
    tags: Mapping[str, str] = field(default_factory=dict)  # of the evaluation's MLflow run, beside its own


def subject(config: EvaluateConfig, registry: Registry) -> Subject:
    """What the config names.

    Raises:
        ConfigError: the run has no such checkpoint here, or nothing to be evaluated on.
    """
    if config.run is None:
        return _model(config)
    run = registry.get_run(config.run)
    trained = config_of(run)
    rows = {row.step: row for row in registry.list_checkpoints(run.id)}
    step = config.step if config.step is not None else max(rows, default=None)
    if step is None or step not in rows:
        known = ", ".join(map(str, rows)) or "it has none"
        raise ConfigError(f"run {run.name} has no checkpoint of step {config.step or 'any'} (checkpoints: {known})")
    folder = rows[step].path
    if not Path(folder).is_dir():
        raise ConfigError(
            f"checkpoint {step} of run {run.name} is not on this machine: loopwright checkpoints fetch {run.name} {step}"
        )
    fields = trainer_fields(trained, Path(str(run.output_dir)))
    fields["eval"] = _held_out(config, trained)
    return Subject(fields, folder, step, run, resolve(trained.tracking.uri), trained.tracking.experiment)


def _held_out(config: EvaluateConfig, trained: RunConfig) -> dict[str, Any]:
    own = trained.eval.model_dump(mode="json") if trained.eval is not None else {}
    if config.dataset is not None:
        own["dataset"] = config.dataset.model_dump(mode="json")
    if config.reward_func is not None:
        own["reward_func"] = config.reward_func.model_dump(mode="json")
    if config.max_completion_length is not None:
        own["max_completion_length"] = config.max_completion_length
    if not own.get("dataset"):
        raise ConfigError(f"run {trained.name} has no `eval`: say what to evaluate it on, by `dataset` (and `reward_func`)")
    return resolve_plain({**own, "every": 0, "patience": None})


def _model(config: EvaluateConfig) -> Subject:
    assert config.model is not None and config.dataset is not None and config.reward_func is not None
    tokens = config.max_completion_length or DEFAULT_TOKENS
    held_out = {
        "dataset": config.dataset.model_dump(mode="json"),
        "reward_func": config.reward_func.model_dump(mode="json"),
        "max_completion_length": tokens,
    }
    fields = {
        "model": config.model,
        "dataset": held_out["dataset"],
        "eval": held_out,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "chat_template_kwargs": config.chat_template_kwargs,
        "name": "evaluation",
    }
    checked = trainer_fields(RUN_CONFIGS["sft"].model_validate(fields), home())
    uri = resolve(config.tracking.uri)
    return Subject(checked, resolve_model(resolve(config.model)), 0, None, uri, config.tracking.experiment)
