"""Flow `evaluate`: a run's checkpoint, an adapter or a model on a held-out set, alone or beside a training.

    EvaluateConfig ─▶ subject (trainer fields, model, step) ─▶ trainers.evaluate ─▶ an MLflow run of its own

The MLflow run is made when the figures are there, so that none is left half done; where a run is measured it is a child of that
run's, with the checkpoint's step. It is not written into the run's own curves: those have one writer, the trainer, which may be
at later steps by now.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import Failed

from flows import artifacts
from flows.config import RUN_CONFIGS, RunConfig, resolve_plain, trainer_fields
from flows.convert import resolve_model
from flows.evaluate_config import EvaluateConfig
from flows.evaluation import score
from flows.failures import Outcome, Policy, RunFailed, describe
from flows.named_servers import address_of
from flows.reaping import reap_all
from flows.runs import config_of, plain_name
from infra.errors import InfraError
from infra.gpus import visible_gpus
from infra.home import home
from infra.leases import GpuLease, LeaseManager
from infra.redaction import protect_references, redact_logs
from infra.registry import Registry, RunRow
from infra.tracking import Tracker, default_uri
from infra.tracking_tags import PARENT_TAG
from trainers.errors import ConfigError, LoopwrightError
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


@flow(name="evaluate", log_prints=True, persist_result=False)
def evaluate(config: EvaluateConfig) -> Any:
    """Measure a run's checkpoint, an adapter or a model on a held-out set; the figures go to MLflow.

    Args:
        config: what is measured, on what, by which reward function.
    """
    protect_references(config.model_dump(mode="json"))
    redact_logs()
    registry = Registry()
    print(reap_all(registry))
    try:
        found = subject(config, registry)
        result = measure(config, found, registry)
    except (InfraError, LoopwrightError, ValueError) as error:
        return Failed(message=describe(error), data=error)
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in result.items())]
    artifacts.markdown("evaluation", "\n".join(lines), f"Evaluation of {result['subject']}")
    return result


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
        "name": "evaluation",
    }
    checked = trainer_fields(RUN_CONFIGS["sft"].model_validate(fields), home())
    uri = resolve(config.tracking.uri)
    return Subject(checked, resolve_model(resolve(config.model)), 0, None, uri, config.tracking.experiment)


def measure(config: EvaluateConfig, found: Subject, registry: Registry) -> dict[str, Any]:
    """The figures, in MLflow too.

    Raises:
        RunFailed: the retry policy is used up.
    """
    what = f"{found.run.name} step {found.step}" if found.run else found.model
    name = config.name or plain_name(f"evaluate {what}")
    folder = home() / "evaluations" / f"{plain_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    url, key = address_of(config.server.url, config.server, registry) if config.server and config.server.url else (None, None)
    payload = {"config": found.fields, "model": found.model, "url": url}
    policy = Policy(config.retry)
    with LeaseManager(registry) as leases:
        run_id = found.run.id if found.run else None
        gpus = leases.lease_gpus(1, run_id) if visible_gpus() and url is None else GpuLease()
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus.devices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        env = {**os.environ, **devices, **({"VLLM_API_KEY": key} if key else {})}
        while True:
            try:
                scores = score(payload, folder, "evaluate", env, leases, found.run)
                break
            except RunFailed as error:
                policy.wait(Outcome(error.failure, str(error), error.traceback), "evaluation")
    figures = {name: scores[name] for name in ("accuracy", "scored", "problems", "failed", "mean_length", "clipped_ratio")}
    mlflow_run = _track(name, folder, found, scores)
    print(f"accuracy {scores['accuracy']:.4f} of {what}, {scores['scored']} problems")
    return {"subject": what, **figures, "mlflow_run": mlflow_run, "folder": str(folder)}


def _track(name: str, folder: Path, found: Subject, scores: dict[str, Any]) -> str | None:
    """The MLflow run's id; None: MLflow is out of reach, and `python -m infra.tracking FOLDER` sends it later."""
    tags = {**found.tags, "loopwright.flow": "evaluate", "loopwright.model": found.model}
    if found.run is not None:
        tags |= {"loopwright.run": found.run.name, "loopwright.step": str(found.step)}
        if found.run.mlflow_run_id is not None:
            tags[PARENT_TAG] = found.run.mlflow_run_id
    tracker = Tracker(folder, found.uri or default_uri(), found.experiment, name, tags=tags, system_metrics_s=0)
    tracker.start({"model": found.model, "step": found.step, "eval": found.fields["eval"]}, None, 0)
    tracker.log(
        found.step,
        {
            "eval/accuracy": scores["accuracy"],
            "completions/mean_length": scores["mean_length"],
            "completions/clipped_ratio": scores["clipped_ratio"],
        },
    )
    tracker.commit(found.step)
    tracker.log_artifact_dir(folder / "evaluate.out.json", "evaluation")
    tracker.close("FINISHED")
    return tracker.run_id
