"""A run whose checkpoints go to shared storage goes on without its folder: on another machine, or after the loss of a disk."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from infra.registry import Registry
from infra.tracking import default_uri
from tests.flows.kill_scenes import Scene, wait_for
from tests.flows.runs_for_real import start
from tests.support.s3 import S3Server, s3

__all__ = ["s3"]

STEPS = 16


@pytest.mark.timeout(900)
def test_a_run_goes_on_from_shared_storage_without_its_folder(
    tmp_path: Path,
    home: Path,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    scene = Scene(tmp_path, home)
    fields = {"max_steps": STEPS, "num_train_epochs": STEPS, "storage": {"uri": "s3://runs/team"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(scene.config("one", **fields)))
    log = tmp_path / "run.log"
    stored = s3.folder / "team" / "one"

    process = start("run", "sft", str(path), log=log)
    wait_for(lambda: (stored / "checkpoint-4" / "manifest.json").exists() or process.poll() is not None, "a stored checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) != 0, "it was still training"
    registry = Registry()
    run = registry.get_run("one")
    assert run.status == "KILLED" and run.output_dir, log.read_text()
    saved = json.loads((max(stored.glob("checkpoint-*"), key=_step) / "manifest.json").read_text())["step"]
    assert saved == registry.list_checkpoints(run.id)[-1].step, "the step at which it was stopped was saved and stored"
    shutil.rmtree(run.output_dir)

    scene.finish.touch()
    assert start("resume", "one", log=log).wait(600) == 0, log.read_text()
    run = registry.get_run("one")
    assert run.status == "FINISHED"
    assert [attempt.resume_step for attempt in registry.list_attempts(run.id)] == [0, saved]
    last = registry.list_checkpoints(run.id)[-1]
    assert (last.step, last.uri) == (STEPS, f"s3://runs/team/one/checkpoint-{STEPS}")
    assert (stored / f"checkpoint-{STEPS}" / "manifest.json").exists()
    assert run.mlflow_run_id is not None
    losses = MlflowClient(default_uri()).get_metric_history(run.mlflow_run_id, "loss")
    assert [point.step for point in losses] == list(range(1, STEPS + 1))
    state = json.loads((Path(str(run.output_dir)) / f"checkpoint-{STEPS}" / "rollout_state.json").read_text())
    assert sum(epoch["trained"] for epoch in state["epochs"].values()) == 2 * STEPS, "the data went on where it was"


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
