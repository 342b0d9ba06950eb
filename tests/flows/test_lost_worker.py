"""A flow run killed together with its worker: an automation of Prefect finds it by its silence, and the reaper cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.automations import HEARTBEAT_S
from flows.deployments import Plan, deploy, standard_targets
from infra.registry import Registry
from tests.flows.runs_for_real import processes, sft_config, state_of, trigger, wait_for
from tests.support.prefect_server import PrefectServer, prefect_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def server(home: Path) -> Iterator[PrefectServer]:
    with prefect_server() as running:
        yield running


@pytest.fixture
def workers(server: PrefectServer) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for worker in started:
        if worker.poll() is None:
            worker.terminate()
            worker.wait(60)


def work(server: PrefectServer, home: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "loopwright", "--type", "process"]
    with (home / "worker.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, **server.environment}, stdout=log, stderr=log)


def test_a_run_killed_with_its_worker_ends_crashed_and_is_reaped(
    server: PrefectServer, workers: list[subprocess.Popen[bytes]], home: Path, tmp_path: Path
) -> None:
    deploy(Plan(standard_targets(["sft", "reap"]), silence_s=HEARTBEAT_S + 15))
    config = sft_config(tmp_path, "lost", max_steps=10_000_000, num_train_epochs=10_000_000, save_steps=1_000_000)
    workers.append(work(server, home))
    with server.api() as api:
        flow_run = trigger(api, config)
        registry = Registry()
        wait_for(lambda: (run := registry.find_run("lost")) and run.progress.get("step"), "the run trains")
        owner = registry.get_run("lost").owner
        assert owner is not None
        workers[0].kill()
        os.kill(owner.pid, signal.SIGKILL)
        workers[0].wait()
        assert state_of(api, flow_run)["type"] == "RUNNING"  # nobody is left to say otherwise
        wait_for(lambda: state_of(api, flow_run)["type"] == "CRASHED", "the automation notices the silence", 400)
        assert "no heartbeat" in state_of(api, flow_run)["message"]

        workers.append(work(server, home))
        reaper = api.get("/deployments/name/reap/local").json()["id"]
        query = {"deployments": {"id": {"any_": [reaper]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
        wait_for(lambda: api.post("/flow_runs/filter", json=query).json(), "the reaper ran", 400)
    run = registry.get_run("lost")
    assert run.status == "FAILED" and run.cause
    assert processes(home, "trainers.main") == []
    assert not [lease for lease in registry.list_leases() if lease.run_id == run.id]
