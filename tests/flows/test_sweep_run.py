"""A whole sweep through every real part, killed in its middle: flow runs, trainers, Optuna, MLflow."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.sweep_outcome import latest
from infra.registry import Registry
from infra.registry_records import TrialRow
from tests.flows.runs_for_real import processes, start, wait_for
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(1800)
PATIENCE_S = 900.0
# Far more steps than anybody waits for: this trial ends only by being stopped.
ENDLESS = 1_000_000


def write_sweep(folder: Path, **fields: Any) -> Path:
    """Trials of a tiny model that differ in length, judged by how far their learning rate has come down: the endless one is
    always the worst, whatever the machine is busy with."""
    rows = [{"prompt": f"{index}+{index}=", "completion": str(2 * index)} for index in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "model": str(build_tiny_model(folder / "model")),
        "dataset": {"path": str(folder / "rows.jsonl")},
        "per_device_train_batch_size": 4,
        "max_length": 32,
        "save_steps": 20,
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": False,
    }
    sweep = {
        "name": "lengths",
        "kind": "sft",
        "base": base,
        "space": {"max_steps": [40, ENDLESS, 60], "optim.learning_rate": [0.001]},
        "sampler": "grid",
        "metric": "learning_rate",
        "direction": "minimize",
        "average_steps": 1,
        "parallel": 2,
        "pruning": {"type": "median", "startup_trials": 2, "warmup_steps": 20, "every_steps": 10},
        "retry": {"backoff_s": 0},
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep | fields))
    return path


def trials(registry: Registry) -> list[TrialRow]:
    row = registry.find_sweep("lengths")
    return registry.list_trials(row.id) if row is not None else []


def test_a_sweep_killed_in_its_middle_goes_on_and_ends_with_every_trial_once(home: Path, tmp_path: Path) -> None:
    path, log, registry = write_sweep(tmp_path, seed=0), tmp_path / "log", Registry()
    first = start("sweep", "run", str(path), log=log, OMP_NUM_THREADS="1")
    try:
        wait_for(
            lambda: any(row.status == "FINISHED" for row in trials(registry)) or first.poll() is not None, "a trial", PATIENCE_S
        )
    finally:
        first.kill()
        first.wait()
    before = {row.number: registry.list_attempts(str(row.run_id)) for row in trials(registry) if row.status == "FINISHED"}
    assert before, log.read_text()[-5000:]

    second = start("sweep", "resume", "lengths", log=log, OMP_NUM_THREADS="1")
    assert second.wait(PATIENCE_S) == 0, log.read_text()[-5000:]
    sweep = registry.get_sweep("lengths")
    rows = latest(trials(registry))
    assert (sweep.status, sweep.cause, sweep.owner) == ("FINISHED", None, None)
    by_steps = {row.params["max_steps"]: row for row in rows}
    assert sorted(by_steps) == [40, 60, ENDLESS] and len(rows) == 3
    assert {steps: row.status for steps, row in by_steps.items()} == {40: "FINISHED", 60: "FINISHED", ENDLESS: "PRUNED"}
    assert by_steps[ENDLESS].number == 2  # so that there was one to compare it with
    for number, attempts in before.items():  # what had finished was not run again
        row = next(row for row in rows if row.number == number)
        assert len(registry.list_attempts(str(row.run_id))) == len(attempts)
    runs = {steps: registry.get_run(f"lengths-t{row.number}") for steps, row in by_steps.items()}
    assert {steps: run.status for steps, run in runs.items()} == {40: "FINISHED", 60: "FINISHED", ENDLESS: "KILLED"}
    assert str(runs[ENDLESS].cause).startswith("pruned at step 20, learning_rate 0.0009")
    best = min((40, 60), key=lambda steps: by_steps[steps].value or 1.0)
    assert sweep.result["best"]["run"] == runs[best].name
    assert registry.list_leases() == [] and processes(home) == []

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    parent = client.get_run(str(sweep.mlflow_run_id))
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["loopwright.best_trial"] == sweep.result["best"]["run"]
    assert [point.step for point in client.get_metric_history(parent.info.run_id, "sweep/best")] == [1, 2]
    artefacts = {file.path for file in client.list_artifacts(parent.info.run_id, "sweep")}
    assert artefacts == {"sweep/sweep.json", "sweep/sweep.md", "sweep/history.png"}  # two values: nothing on importance
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {child.info.run_id for child in children} == {run.mlflow_run_id for run in runs.values()}
    for steps in (40, 60):
        history = client.get_metric_history(str(runs[steps].mlflow_run_id), "loss")
        assert [point.step for point in history] == list(range(1, steps + 1))
    stopped = client.get_run(str(runs[ENDLESS].mlflow_run_id))
    assert stopped.info.status == "KILLED"
    assert stopped.data.tags["loopwright.pruned"] == runs[ENDLESS].cause == stopped.data.tags["loopwright.cause"]


@pytest.mark.slow
def test_a_sweep_that_is_stopped_stops_its_trials_and_says_so(home: Path, tmp_path: Path) -> None:
    space = {"max_steps": [ENDLESS], "optim.learning_rate": [0.001]}
    path, log, registry = write_sweep(tmp_path, space=space), tmp_path / "log", Registry()
    sweep = start("sweep", "run", str(path), log=log, OMP_NUM_THREADS="1")

    def trains() -> bool:
        run = registry.find_run("lengths-t0")
        return run is not None and run.progress.get("step", 0) > 20

    try:
        wait_for(lambda: trains() or sweep.poll() is not None, "the trial trains", PATIENCE_S)
        os.kill(sweep.pid, signal.SIGTERM)
        assert sweep.wait(PATIENCE_S) != 0, log.read_text()[-5000:]
    finally:
        sweep.kill()
        sweep.wait()
    row, run = registry.get_sweep("lengths"), registry.get_run("lengths-t0")
    assert (row.status, row.owner) == ("KILLED", None)
    assert [(one.status, one.cause) for one in registry.list_attempts(run.id)] == [("KILLED", "stopped by SIGTERM")]
    wait_for(lambda: processes(home) == [], "no process is left", PATIENCE_S)
    # What a slow trial had no time to give up, and the port of the embedded Prefect server, whose owner the signal ended.
    assert start("reap", log=log).wait(PATIENCE_S) == 0, log.read_text()[-5000:]
    run = registry.get_run("lengths-t0")
    assert (run.status, run.owner) == ("KILLED", None)
    assert [trial.status for trial in trials(registry)] == ["RUNNING"]  # to be gone on with
    assert registry.list_checkpoints(run.id)
    assert registry.list_leases() == []

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    assert {client.get_run(str(one.mlflow_run_id)).info.status for one in (row, run)} == {"KILLED"}
