"""The evaluate stage: `python -m trainers.evaluate` under supervision, its figures to MLflow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flows.config import trainer_fields
from flows.experiment import Experiment
from flows.failures import Outcome, Policy, RunFailed
from flows.training import POLL_S, environment
from infra.leases import LeaseManager
from infra.process import Supervised
from infra.registry import RunRow
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
    fields = {**trainer_fields(experiment.config, experiment.folder), **experiment.servers.config_fields()}
    # A server that came after the last sync holds the weights it was started with.
    urls = experiment.servers.serving(step) if step else fields.get("vllm_server_base_url")
    payload = {
        "config": fields,
        "model": fields["model"] if model == experiment.config.model else model,
        "url": urls if served else None,
    }
    scores = score(
        payload,
        experiment.folder / "logs",
        f"evaluate-{step}",
        environment(experiment.job()),
        experiment.leases,
        experiment.run,
        experiment.servers.death if served else lambda: None,
    )
    _track(experiment, step, scores["accuracy"])
    return scores


def score(
    payload: dict[str, Any],
    folder: Path,
    stem: str,
    env: Mapping[str, str],
    leases: LeaseManager,
    run: RunRow | None,
    death: Callable[[], str | None] = lambda: None,
) -> dict[str, Any]:
    """What `trainers.evaluate` says of `payload`; its files are `<folder>/<stem>.*`.

    Args:
        death: how the server died that it asks, if it did.

    Raises:
        RunFailed: it failed, or was killed, or its server was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request, out, log = (folder / f"{stem}.{kind}" for kind in ("json", "out.json", "log"))
    request.write_text(json.dumps(payload, indent=2, ensure_ascii=False), encoding="utf-8")
    out.unlink(missing_ok=True)
    lease = leases.lease_process(f"evaluation of {run.name if run else folder.name}", run.id if run else None)
    command = [sys.executable, "-m", "trainers.evaluate", str(request), str(out)]
    try:
        process = Supervised.start(command, env=env, log=log, lease=lease.id)
        try:
            _wait(process, death)
        finally:
            process.stop()
    finally:
        leases.release(lease)
    return json.loads(out.read_text(encoding="utf-8"))


def _wait(process: Supervised, death: Callable[[], str | None]) -> None:
    while process.poll() is None:
        time.sleep(POLL_S)
        if died := death():
            raise RunFailed("infrastructure", died)
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
