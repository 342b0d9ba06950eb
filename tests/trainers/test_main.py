"""The trainer's entry for flows: registry and MLflow see the run; every way to end leaves the right exit code and record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.registry import URL_VARIABLE, Registry
from infra.registry_writer import RegistryWriter
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import wait_until
from trainers import main as module
from trainers.checkpoint import fault
from trainers.errors import ConfigError, DivergenceError, RolloutProcessDied

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and its database library's own


class Job:
    """A run in the registry and the files its attempts are started from."""

    def __init__(self, folder: Path, name: str, **fields) -> None:
        self.folder, self.name = folder, name
        self.registry = Registry()
        self.run = self.registry.create_run(name, "sft-long-context", {})
        rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.fields = {
            "type": "sft",
            "model": str(folder / "model"),
            "dataset": {"path": str(folder / "data.jsonl")},
            "output_dir": str(folder / name),
            "max_length": 32,
            "token_budget": 128,
            "learning_rate": 1e-3,
            "save_steps": 2,
            "max_steps": 3,
            **fields,
        }

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.folder / 'mlflow.db'}"

    def attempt(self, **changes) -> tuple[int, Path]:
        number = self.registry.start_attempt(self.run.id).number
        run = {
            "id": self.run.id,
            "name": self.name,
            "attempt": number,
            "tracking_uri": self.tracking_uri,
            "experiment": "tests",
            "mlflow_run_id": self.registry.get_run(self.run.id).mlflow_run_id,
            "tags": {"purpose": "test"},
        }
        path = self.folder / f"{self.name}-{number}.json"
        path.write_text(json.dumps({"config": {**self.fields, **changes}, "run": run}))
        return number, path

    def row(self, number: int):
        return next(row for row in self.registry.list_attempts(self.run.id) if row.number == number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("main")
    build_tiny_model(path / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(URL_VARIABLE, f"sqlite:///{path / 'registry.db'}")
        yield path


@pytest.fixture(scope="module")
def stopped(folder) -> tuple[Job, dict]:
    """Three steps; then a second attempt, stopped by SIGTERM somewhere after step 6."""
    job = Job(folder, "sft")
    _, first = job.attempt()
    codes = [module.main([str(first)])]
    number, second = job.attempt(max_steps=100_000)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainers.main", str(second)], env=environment, stderr=log, stdout=log
        )
        try:
            wait_until(lambda: job.registry.get_run(job.run.id).progress.get("step", 0) > 6, 120)
            process.send_signal(signal.SIGTERM)
            codes.append(process.wait(60))
        finally:
            process.kill()
    return job, {"codes": codes, "second": number, "log": (folder / "log").read_text()}


def test_a_run_reaches_registry_and_mlflow(stopped):
    from mlflow import MlflowClient

    job, seen = stopped
    assert seen["codes"][0] == 0
    run = job.registry.get_run(job.run.id)
    client = MlflowClient(job.tracking_uri)
    assert run.mlflow_run_id is not None
    record = client.get_run(run.mlflow_run_id)
    assert record.data.params["max_length"] == "32" and record.data.tags["purpose"] == "test"
    assert record.inputs.dataset_inputs[0].dataset.name == "data.jsonl"
    steps = [point.step for point in client.get_metric_history(run.mlflow_run_id, "loss")]
    assert steps == list(range(1, len(steps) + 1)), "one value per step, over both attempts"
    assert job.row(1).resume_step == 0


def test_sigterm_saves_the_step_it_is_in_and_exits_143(stopped):
    job, seen = stopped
    assert seen["codes"][1] == 128 + signal.SIGTERM, seen["log"]
    last = job.registry.list_checkpoints(job.run.id)[-1]
    assert last.step > 6 and fault(Path(last.path)) is None
    row = job.row(seen["second"])
    assert row.resume_step == 3 and row.ended_at is None, "the flow judges what it stopped itself"
    assert f"ended at step {last.step} (signal)" in seen["log"]
    progress = job.registry.get_run(job.run.id).progress
    assert progress["step"] <= last.step and progress["max_steps"] == 100_000 and progress["eta_s"] > 0


def test_bad_data_closes_the_attempt_with_class_cause_and_traceback(folder, capfd):
    job = Job(folder, "bad", dataset={"path": str(folder / "data.jsonl"), "completion_column": "nothing"})
    number, path = job.attempt()
    assert module.main([str(path)]) == 1
    row = job.row(number)
    assert (row.status, row.failure_class) == ("FAILED", "user")
    assert "no column `nothing`" in str(row.cause) and "DatasetError" in str(row.traceback)
    assert "trainer failed:" in capfd.readouterr().err


def test_a_wrong_config_is_one_line_per_value():
    with pytest.raises(ConfigError) as caught:
        module.read_config({"type": "sft", "model": "m", "dataset": {"path": "d"}, "max_length": 1, "learning_rate": -1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and lines[0].startswith("learning_rate: ") and lines[1].startswith("max_length: ")


def test_references_are_resolved_for_use_and_stored_as_written(folder, monkeypatch):
    monkeypatch.setenv("TEST_DATA", str(folder / "data.jsonl"))
    config = module.read_config({"type": "sft", "model": "m", "dataset": {"path": "${oc.env:TEST_DATA}"}})
    assert config.dataset.path == str(folder / "data.jsonl")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (DivergenceError("x"), "divergence"),
        (RolloutProcessDied("x"), "infrastructure"),
        (MemoryError("x"), "memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "memory"),
        (ZeroDivisionError("x"), "user"),
    ],
)
def test_failure_classes(error, failure):
    assert module.describe(error)[0] == failure


def test_a_database_out_of_reach_costs_a_warning_and_merges_progress(caplog):
    written, gate = [], threading.Event()

    class Slow:
        def progress(self, run_id, values):
            gate.wait(10)
            written.append(values)
            if len(written) == 1:
                raise OSError("database is locked")

    writer = RegistryWriter(Slow(), "r")
    for step in (1, 2, 3):
        writer.progress({"step": step})
    gate.set()
    wait_until(lambda: bool(written), 10)
    writer.progress({"step": 4, "reward": 0.5})
    writer.close()
    assert written[-1]["step"] == 4 and written[-1]["reward"] == 0.5 and len(written) <= 3
    assert "database is locked" in caplog.text


def test_an_environment_variable_that_is_not_set_closes_the_attempt_too(folder):
    job = Job(folder, "unset", dataset={"path": "${oc.env:LOOPWRIGHT_TEST_UNSET}"})
    number, path = job.attempt()
    assert module.main([str(path)]) == 1
    assert (job.row(number).failure_class, "LOOPWRIGHT_TEST_UNSET is not set" in str(job.row(number).cause)) == ("user", True)
