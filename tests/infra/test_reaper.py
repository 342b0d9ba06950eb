"""Dead owners are cleaned up after, living ones are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from infra.process import Supervised, kill_marked, marked, process_start_time
from infra.reaper import owner_alive, reap
from infra.registry import Owner, Registry
from tests.support.waiting import wait_until


@pytest.fixture
def registry(tmp_path):
    registry = Registry(tmp_path / "registry.db")
    yield registry
    registry.close()


@pytest.fixture
def dead() -> Owner:
    """An owner that has lived and is gone."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        start = process_start_time(child.pid)
    assert start is not None
    return Owner(child.pid, start, Owner.current().host)


@pytest.fixture
def sleeper(tmp_path):
    """Starts a process that sleeps under a mark."""
    started: list[Supervised] = []

    def start(lease: str) -> Supervised:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        started.append(Supervised.start(command, None, tmp_path / "log", lease))
        return started[-1]

    yield start
    for process in started:
        kill_marked(process.lease)
        process.wait(30)


def test_a_dead_owner_s_lease_is_reaped_with_its_processes(registry, dead, sleeper):
    theirs = registry.insert_lease("port", "1", dead, ttl_s=1000)
    ours = registry.insert_lease("port", "2", Owner.current(), ttl_s=1000)
    server = registry.record_server(None, "student", "http://127.0.0.1:1", None, lease_id=theirs.id)
    orphan, kept = sleeper(theirs.id), sleeper(ours.id)

    report = reap(registry)

    assert [row.id for row in registry.list_leases()] == [ours.id]
    assert report.leases == [f"port 1: its owner, process {dead.pid}, is gone"]
    assert {orphan.pid, orphan.supervisor_pid} <= set(report.killed)
    assert marked(theirs.id) == [] and kept.poll() is None
    assert registry.list_servers()[0].id == server.id
    assert registry.list_servers()[0].exit == f"reaped: its owner, process {dead.pid}, is gone"
    assert str(reap(registry)) == "nothing to reap"


def test_a_lease_that_was_not_renewed_is_reaped(registry, sleeper):
    lease = registry.insert_lease("port", "1", Owner.current(), ttl_s=-1)
    process = sleeper(lease.id)
    assert "did not renew it in time" in reap(registry).leases[0]
    assert registry.list_leases() == []
    assert process.wait(30) == -signal.SIGKILL


def test_leases_of_other_machines_are_left_alone(registry):
    registry.insert_lease("port", "1", Owner(1, 1.0, "another-machine"), ttl_s=-1)
    assert reap(registry).leases == []
    assert len(registry.list_leases()) == 1


def test_a_pid_used_again_is_a_dead_owner():
    current = Owner.current()
    assert owner_alive(current)
    assert not owner_alive(Owner(current.pid, current.start_time - 1, current.host))
    assert owner_alive(Owner(current.pid, current.start_time - 1, "another-machine"))


def test_a_run_whose_owner_is_gone_has_failed(registry, dead):
    run = registry.create_run("theirs", "train-grpo")
    registry.update_run(run.id, status="RUNNING", owner=dead)
    registry.start_attempt(run.id)
    for name, status, owner in (("ours", "RUNNING", Owner.current()), ("done", "FINISHED", dead), ("unowned", "PENDING", None)):
        registry.update_run(registry.create_run(name, "train-grpo").id, status=status, owner=owner)

    assert reap(registry).runs == {"theirs": "FAILED"}

    row = registry.get_run("theirs")
    assert (row.status, row.failure_class, row.owner) == ("FAILED", "infrastructure", dead)
    assert row.cause == f"the flow's process {dead.pid} on {dead.host} is gone: killed, or the machine was restarted"
    attempt = registry.list_attempts(run.id)[0]
    assert (attempt.status, attempt.cause) == ("FAILED", row.cause)
    assert [registry.get_run(name).status for name in ("ours", "done", "unowned")] == ["RUNNING", "FINISHED", "PENDING"]
    assert reap(registry).runs == {}


def test_a_run_whose_flow_was_being_stopped_is_killed(registry, dead):
    run = registry.create_run("theirs", "train-grpo")
    registry.update_run(run.id, status="RUNNING", owner=dead)
    registry.start_attempt(run.id)
    registry.end_attempt(run.id, 1, "KILLED", cause="stopped by SIGTERM")
    assert reap(registry).runs == {"theirs": "KILLED"}
    row = registry.get_run("theirs")
    assert (row.status, row.failure_class, row.cause, row.owner) == ("KILLED", None, "stopped by SIGTERM", dead)


def test_a_run_that_is_resumed_meanwhile_is_not_failed(registry, dead, monkeypatch):
    run = registry.create_run("resumed", "train-grpo")
    registry.update_run(run.id, status="RUNNING", owner=dead)
    with subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as resumer:
        start = process_start_time(resumer.pid)
        assert start is not None
        stale = registry.list_runs()
        registry.update_run(run.id, owner=Owner(resumer.pid, start, dead.host))
        monkeypatch.setattr(registry, "list_runs", lambda **_: stale)
        assert reap(registry).runs == {}
    assert registry.get_run("resumed").status == "RUNNING"
    assert registry.get_run("resumed").owner_pid == resumer.pid


def test_sigkill_of_owner_and_supervisor_leaves_work_for_the_reaper_only(registry, tmp_path):
    """Both are killed at once, so nobody is left who knows of the daemon: the mark and the row are."""
    code = f"""
        import time
        from pathlib import Path
        from infra.leases import LeaseManager
        from infra.registry import Registry
        from tests.infra.test_supervisor import with_daemon
        manager = LeaseManager(Registry({str(tmp_path / "registry.db")!r}))
        lease = manager.lease_port()
        process, daemon = with_daemon(Path({str(tmp_path)!r}), lease.id)
        print(lease.id, lease.port, process.supervisor_pid, daemon, flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        lease, port, supervisor, daemon = owner.stdout.readline().split()
        assert reap(registry).leases == [], "the owner is alive"
        os.kill(int(supervisor), signal.SIGKILL)
        owner.kill()
        owner.wait()
    wait_until(lambda: marked(lease) == [int(daemon)], what="death of all but the daemon")
    report = reap(registry)
    assert report.killed == [int(daemon)]
    assert report.leases == [f"port {port}: its owner, process {owner.pid}, is gone"]
    assert not Path(f"/proc/{daemon}").exists() or process_start_time(int(daemon)) is None
    assert registry.list_leases() == []


def test_what_cannot_be_killed_keeps_its_lease(registry, dead, monkeypatch, caplog):
    lease = registry.insert_lease("gpu", "0", dead, ttl_s=1000)

    def cannot(mark: str, timeout_s: float = 10.0) -> list[int]:
        raise TimeoutError(f"processes [7] of lease {mark} did not die")

    monkeypatch.setattr("infra.reaper.kill_marked", cannot)
    assert reap(registry).leases == []
    assert [row.id for row in registry.list_leases()] == [lease.id]
    assert "gpu 0 cannot be freed" in caplog.text
    assert time.time() < lease.expires_at
