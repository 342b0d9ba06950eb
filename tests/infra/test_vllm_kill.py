"""SIGKILL of a real server's API process, and of everyone who knows of a server: its engine and workers must not stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest

from infra.leases import LeaseManager
from infra.process import kill_marked, marked, process_start_time
from infra.reaper import reap
from infra.registry import Registry
from infra.vllm import ServerSpec, start_server
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def model(tmp_path):
    return str(build_tiny_model(tmp_path / "model"))


def test_sigkill_of_the_api_server_takes_the_engine_along(tmp_path, model):
    registry = Registry(tmp_path / "registry.db")
    with LeaseManager(registry) as leases:
        port = leases.lease_port()
        server = start_server(ServerSpec(model, device="cpu"), port, log_path=tmp_path / "log")
        server.wait_ready()
        below = [pid for pid in marked(port.id) if pid not in (server.process.pid, server.process.supervisor_pid)]
        assert len(below) >= 2, "engine and worker"
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(60) == -signal.SIGKILL
        assert not server.alive() and server.describe_exit() == "killed by SIGKILL"
        assert [pid for pid in below if process_start_time(pid) is not None] == []
        assert marked(port.id) == []


def test_sigkill_of_a_server_by_hand_and_of_its_supervisor(tmp_path, model):
    """Whoever could clean up is dead; `loopwright reap` finds the rest."""
    home = tmp_path / "home"
    command = [sys.executable, "-m", "infra.vllm", "serve", model, "--device", "cpu"]
    environment = {**os.environ, "LOOPWRIGHT_HOME": str(home), "VLLM_API_KEY": "by-hand"}
    serving = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    lease = None
    try:
        with serving.stdout:
            ready = next(line for line in serving.stdout if line.startswith("ready at "))
            url = ready.split()[2]
            assert httpx.get(f"{url}/version", headers={"Authorization": "Bearer by-hand"}).json()["version"]
            registry = Registry(home / "registry.db")
            lease = registry.list_leases("port")[0]
            assert reap(registry).leases == [], "its owner is alive"
            children = marked(lease.id)
            supervisor = next(pid for pid in children if parent(pid) == serving.pid)
            os.kill(supervisor, signal.SIGKILL)
            serving.kill()
            serving.wait()
    finally:
        serving.kill()
        serving.wait()
    wait_until(lambda: process_start_time(serving.pid) is None)
    report = reap(registry)
    assert report.leases == [f"port {lease.resource}: its owner, process {serving.pid}, is gone"]
    assert [pid for pid in children if process_start_time(pid) is not None] == []
    assert kill_marked(lease.id) == [] and registry.list_leases() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
