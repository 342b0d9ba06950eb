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
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import Failed

from flows import artifacts
from flows.evaluate_config import EvaluateConfig
from flows.evaluate_subject import Subject, subject
from flows.evaluation import score
from flows.failures import Outcome, Policy, RunFailed, describe
from flows.named_servers import address_of
from flows.reaping import begin_flow
from flows.runs import plain_name
from infra.errors import InfraError
from infra.gpus import visible_gpus
from infra.home import home
from infra.leases import GpuLease, LeaseManager
from infra.registry import Registry
from infra.tracking import Tracker, default_uri
from infra.tracking_tags import PARENT_TAG
from trainers.errors import LoopwrightError


@flow(name="evaluate", log_prints=True, persist_result=False)
def evaluate(config: EvaluateConfig) -> Any:
    """Measure a run's checkpoint, an adapter or a model on a held-out set; the figures go to MLflow.

    Args:
        config: what is measured, on what, by which reward function.
    """
    registry = begin_flow(config)
    try:
        found = subject(config, registry)
        result = measure(config, found, registry)
    except (InfraError, LoopwrightError, ValueError) as error:
        return Failed(message=describe(error), data=error)
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in result.items())]
    artifacts.markdown("evaluation", "\n".join(lines), f"Evaluation of {result['subject']}")
    return result


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
