"""Tracking server, Prefect's server and the database stopped in mid-run, one after the other: training goes on meanwhile, and
nothing is missing afterwards.

One run lives through all of it. Its evaluations after each step sleep as long as the file `slow` is there, so that the run
spans the outages whatever the machine's pace.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flows import prefect_api
from infra.leases import LeaseManager
from infra.mlflow_server import MLflowServer
from infra.registry import Registry
from tests.flows.runs_for_real import processes, start, wait_for
from tests.support.postgres import PostgresServer
from tests.support.tiny_model import build_tiny_model

STEPS = 200
PACE = """
import os, time
def slow(completions, **columns):
    if os.path.exists({slow!r}):
        time.sleep(1.0)
    return [0.0 for _ in completions]
"""


class Run:
    """An SFT run in a process of its own, and what it says of its steps."""

    def __init__(self, folder: Path, tracking_uri: str, environment: dict[str, str], **fields: Any) -> None:
        self.log, self.slow = folder / "log", folder / "slow"
        self.slow.touch()
        rows = "".join(f'{{"prompt": "{n}+{n}=", "completion": "{2 * n}", "answer": "{2 * n}"}}\n' for n in range(8))
        (folder / "rows.jsonl").write_text(rows)
        (folder / "pace.py").write_text(PACE.format(slow=str(self.slow)))
        config = {
            "name": "outage",
            "model": str(build_tiny_model(folder / "model")),
            "dataset": {"path": str(folder / "rows.jsonl")},
            "eval": {
                "dataset": {"path": str(folder / "rows.jsonl"), "max_rows": 1},
                "reward_func": {"path": f"{folder}/pace.py:slow"},
                "every": 1,
            },
            "max_steps": STEPS,
            "num_train_epochs": STEPS,
            "max_length": 16,
            "per_device_train_batch_size": 8,
            "token_budget": 0,
            "gradient_checkpointing": False,
            "save_steps": 10,
            "tracking": {"uri": tracking_uri, "experiment": "outages"},
            "retry": {"infrastructure": 0},
            **fields,
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        self.process = start("run", "sft", str(folder / "run.yaml"), log=self.log, OMP_NUM_THREADS="1", **environment)
        self.trainer_log = Path(os.environ["LOOPWRIGHT_HOME"]) / "runs" / "outage" / "logs" / "trainer-1.log"

    def step(self) -> int:
        """The last one in the trainer's own log, which depends on nothing that an outage takes away."""
        if not self.trainer_log.exists():
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            return 0
        return max((int(step) for step in re.findall(r" step (\d+)  loss", self.trainer_log.read_text())), default=0)

    def train_through(self, seconds: float) -> None:
        """Returns when the outage has lasted long enough and the run has trained on in it."""
        before, until = self.step(), time.monotonic() + seconds
        wait_for(lambda: self.step() >= before + 4, f"steps during the outage, after step {before}", 120)
        wait_for(lambda: time.monotonic() >= until, "the length of the outage")
        assert self.process.poll() is None, self.log.read_text()[-5000:]
        assert self.step() < STEPS, "the run ended within the outages: they did not fall in mid-run"

    def finish(self) -> None:
        self.slow.unlink()
        assert self.process.wait(300) == 0, self.log.read_text()[-8000:]


class Prefect:
    """Prefect's server on one port, as often as wanted."""

    def __init__(self) -> None:
        self._leases = LeaseManager(Registry(Path(os.environ["LOOPWRIGHT_HOME"]) / "services.db"))
        self.lease = self._leases.lease_port()
        self.url = prefect_api.settings(self.lease.port)["PREFECT_API_URL"]
        self.start()

    def start(self) -> None:
        self._process = prefect_api.start_server(self.lease)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.stop()

    @property
    def pid(self) -> int:
        (pid,) = processes(Path(os.environ["LOOPWRIGHT_HOME"]), "flows.prefect_app:create_app")
        return pid

    def close(self) -> None:
        self._process.stop()
        self._leases.close()


class Services:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = folder / "mlflow"
        self.mlflow = MLflowServer.start(self._port, self._folder)
        self.prefect = Prefect()
        self.mlflow.wait_ready()

    def start_mlflow(self) -> None:
        self.mlflow = MLflowServer.start(self._port, self._folder)
        self.mlflow.wait_ready()

    def close(self) -> None:
        self.mlflow.stop()
        self.prefect.close()


@pytest.fixture
def services(home: Path, tmp_path: Path) -> Iterator[Services]:
    found = Services(tmp_path)
    yield found
    found.close()


@contextmanager
def frozen(send: Callable[[signal.Signals], Any]) -> Iterator[None]:
    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def outages(run: Run, services: Services, database: PostgresServer, seconds: float) -> None:
    wait_for(lambda: run.step() >= 3, "the first steps", 180)
    with frozen(lambda number: os.killpg(services.mlflow.process.pid, number)):
        run.train_through(seconds)
    pid = services.prefect.pid
    with frozen(lambda number: os.kill(pid, number)):
        run.train_through(seconds)

    services.mlflow._signal(signal.SIGKILL)
    services.mlflow.process.wait()
    services.prefect.kill()
    run.train_through(seconds)
    services.start_mlflow()
    services.prefect.start()

    database.stop(signal.SIGQUIT)
    try:
        run.train_through(seconds)
    finally:
        database.start()


def lives_through_outages(
    home: Path, folder: Path, services: Services, database: PostgresServer, url: str, seconds: float
) -> None:
    environment = {"LOOPWRIGHT_REGISTRY_URL": url, "PREFECT_API_URL": services.prefect.url}
    environment |= {"PREFECT_HOME": str(home / "prefect")}
    run = Run(folder, services.mlflow.url, environment)
    try:
        outages(run, services, database, seconds)
        run.finish()
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()

    registry = Registry(url)
    row = registry.get_run("outage")
    assert (row.status, row.owner, row.progress["step"]) == ("FINISHED", None, STEPS)
    assert [(a.status, a.resume_step) for a in registry.list_attempts(row.id)] == [("FINISHED", 0)]
    checkpoints = registry.list_checkpoints(row.id)
    assert [found.step for found in checkpoints] == [STEPS - 20, STEPS - 10, STEPS]
    assert all(Path(found.path).is_dir() for found in checkpoints) and registry.list_leases() == []
    registry.close()

    from mlflow import MlflowClient

    client = MlflowClient(services.mlflow.url)
    mlflow_run = client.get_run(str(row.mlflow_run_id))
    assert mlflow_run.info.status == "FINISHED"
    points = client.get_metric_history(mlflow_run.info.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(1, STEPS + 1))
    stored = {file.path for file in client.list_artifacts(mlflow_run.info.run_id, "checkpoints")}
    assert stored == {f"checkpoints/checkpoint-{step}.json" for step in range(10, STEPS + 1, 10)}
    assert [found.run_id for found in client.search_model_versions("name = 'outage'")] == [row.mlflow_run_id]

    with httpx.Client(base_url=services.prefect.url, timeout=30.0, trust_env=False) as api:
        flow_run = api.get(f"/flow_runs/{row.prefect_flow_run_id}").raise_for_status().json()
        assert flow_run["state"]["type"] == "COMPLETED", flow_run["state"]
        query = {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}}
        artifacts = {found["key"]: found for found in api.post("/artifacts/filter", json=query).raise_for_status().json()}
        assert {"progress", "mlflow-run", "checkpoint", "result"} <= set(artifacts)
        assert artifacts["progress"]["data"] == 100.0


@pytest.mark.timeout(900)
def test_a_run_lives_through_outages_of_ten_seconds(
    home: Path, tmp_path: Path, services: Services, postgres_server: PostgresServer, postgres_url: str
) -> None:
    lives_through_outages(home, tmp_path, services, postgres_server, postgres_url, 10.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_lives_through_outages_of_two_minutes(
    home: Path,
    tmp_path: Path,
    services: Services,
    postgres_server: PostgresServer,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.flows.test_outages.STEPS", 900)
    lives_through_outages(home, tmp_path, services, postgres_server, postgres_url, 120.0)
