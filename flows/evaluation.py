"""The evaluate stage: `python -m trainers.evaluate` under supervision, its figures to MLflow."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from flows.config import trainer_fields
from flows.experiment import Experiment
from flows.training import POLL_S, Outcome, Policy, RunFailed, environment
from infra.process import Supervised
from infra.tracking import Tracker


def evaluate_model(experiment: Experiment, model: str, step: int, served: bool) -> dict[str, Any]:
    """Scores of `model` (see `trainers.evaluate`): completions from the server if it is `served` there, else generated here.

    An evaluation that fails is repeated by the retry policy, without its server if that is what died.

    Raises:
        RunFailed: the retry policy is used up.
    """
    policy = Policy(experiment.config.retry)
    while True:
        try:
            return _evaluate(experiment, model, step, served)
        except RunFailed as error:
            policy.wait(Outcome(error.failure, str(error), error.traceback), "evaluation")
            served = served and experiment.servers.death() is None


def _evaluate(experiment: Experiment, model: str, step: int, served: bool) -> dict[str, Any]:
    job = experiment.job()
    folder = experiment.folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    request, out, log = (folder / f"evaluate-{step}.{kind}" for kind in ("json", "out.json", "log"))
    fields = {**trainer_fields(experiment.config, experiment.folder), **experiment.servers.config_fields()}
    # A server that came after the last sync holds the weights it was started with.
    urls = experiment.servers.serving(step) if step else fields.get("vllm_server_base_url")
    payload = {
        "config": fields,
        "model": fields["model"] if model == experiment.config.model else model,
        "url": urls if served else None,
    }
    request.write_text(json.dumps(payload, indent=2, ensure_ascii=False), encoding="utf-8")
    out.unlink(missing_ok=True)
    lease = experiment.leases.lease_process(f"evaluation of {experiment.run.name}", experiment.run.id)
    command = [sys.executable, "-m", "trainers.evaluate", str(request), str(out)]
    try:
        process = Supervised.start(command, env=environment(job), log=log, lease=lease.id)
        try:
            _wait(experiment, process, served)
        finally:
            process.stop()
    finally:
        experiment.leases.release(lease)
    scores = json.loads(out.read_text(encoding="utf-8"))
    _track(experiment, step, scores["accuracy"])
    return scores


def _wait(experiment: Experiment, process: Supervised, served: bool) -> None:
    while process.poll() is None:
        time.sleep(POLL_S)
        if served and (death := experiment.servers.death()):
            raise RunFailed("infrastructure", death)
    if process.returncode != 0:
        tail = process.log_tail()
        told = [line for line in tail.splitlines() if line.startswith("evaluation failed: ")]
        cause = told[-1] if told else f"the evaluation ended: {process.describe_exit()}\n{tail}"
        raise RunFailed("infrastructure" if (process.returncode or 0) < 0 else "user", cause, tail)


def _track(experiment: Experiment, step: int, accuracy: float) -> None:
    """The figure at its step, unless the trainer has logged that step's already; a tracking outage costs nothing."""
    tracker = Tracker(experiment.folder, system_metrics_s=0, **experiment.tracking_options())
    tracker.log(step, {"eval/accuracy": accuracy})
    tracker.commit(step)
    tracker.close(None)
