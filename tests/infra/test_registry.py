"""The registry, on SQLite and on Postgres alike."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.registry import Owner, Registry, RunExists, RunNotFound, default_url

ME = Owner(pid=100, start_time=1.5, host="here")
OTHER = Owner(pid=200, start_time=2.5, host="here")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "new" / "registry.db")
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    registry = Registry(url)
    yield registry
    registry.close()


def test_a_run_is_found_by_name_and_by_id_and_survives_reopening(registry: Registry, url: str) -> None:
    run = registry.create_run("r1", "train-grpo", {"learning_rate": 1e-6, "nested": {"x": [1, 2]}}, output_dir="/runs/r1")
    again = Registry(url)
    for key in ("r1", run.id):
        found = again.get_run(key)
        assert (found.name, found.flow, found.status, found.output_dir) == ("r1", "train-grpo", "PENDING", "/runs/r1")
        assert found.config == {"learning_rate": 1e-6, "nested": {"x": [1, 2]}}
        assert found.owner is None
    again.close()


def test_a_name_belongs_to_one_run(registry: Registry) -> None:
    registry.create_run("r1", "sft")
    with pytest.raises(RunExists, match="'r1' exists already"):
        registry.create_run("r1", "sft")
    assert len(registry.list_runs()) == 1


def test_an_unknown_run_is_named_and_the_password_is_not(registry: Registry) -> None:
    assert registry.find_run("nope") is None
    with pytest.raises(RunNotFound, match="'nope'"):
        registry.get_run("nope")
    with pytest.raises(RunNotFound, match="'nope'"):
        registry.progress("nope", {"step": 1})


def test_update_run_sets_columns_and_refuses_what_is_none(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    updated = registry.update_run(run.id, status="FAILED", cause="out of memory", failure_class="memory", owner=ME)
    assert (updated.status, updated.cause, updated.owner) == ("FAILED", "out of memory", ME)
    assert registry.get_run("r1").updated_at >= run.updated_at
    assert registry.update_run(run.id, owner=None).owner is None
    with pytest.raises(ValueError, match="DONE"):
        registry.update_run(run.id, status="DONE")
    with pytest.raises(ValueError, match="no column 'colour'"):
        registry.update_run(run.id, colour="red")
    assert [row.name for row in registry.list_runs(status="FAILED")] == ["r1"]
    assert registry.list_runs(status="RUNNING") == []


def test_a_run_is_claimed_from_the_dead_only(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    assert registry.claim_run(run.id, ME, alive=lambda owner: True)
    assert registry.claim_run(run.id, ME, alive=lambda owner: True)  # its own owner may claim it again
    assert not registry.claim_run(run.id, OTHER, alive=lambda owner: owner == ME)
    assert registry.get_run("r1").owner == ME
    assert registry.claim_run(run.id, OTHER, alive=lambda owner: False)
    assert registry.get_run("r1").owner == OTHER


def test_stages_and_progress_are_merged(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    registry.set_stage(run.id, "serve", {"url": "http://a"})
    registry.set_stage(run.id, "train", {"steps": 3})
    registry.set_stage(run.id, "serve", None)
    registry.progress(run.id, {"step": 1, "reward": math.nan})
    registry.progress(run.id, {"step": 2})
    found = registry.get_run("r1")
    assert found.stages == {"train": {"steps": 3}}
    assert found.progress["step"] == 2
    assert found.progress["reward"] is None  # JSON has no NaN
    assert found.progress["updated_at"] <= time.time()


def test_the_first_to_end_an_attempt_knows_best(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    assert registry.start_attempt(run.id).number == 1
    assert registry.start_attempt(run.id).number == 2
    registry.set_resume_step(run.id, 2, 40)
    registry.end_attempt(run.id, 2, "FAILED", "user", "ValueError: no", "Traceback …")
    row = registry.end_attempt(run.id, 2, "FAILED", "infrastructure", "exit code 1")
    assert (row.failure_class, row.cause, row.traceback, row.resume_step) == ("user", "ValueError: no", "Traceback …", 40)
    first, second = registry.list_attempts(run.id)
    assert (first.status, first.ended_at) == ("RUNNING", None)
    assert second.ended_at is not None
    # An attempt whose number is started again is a new one.
    assert registry.start_attempt(run.id, number=2, resume_step=50).cause is None
    with pytest.raises(ValueError, match="no attempt 9"):
        registry.end_attempt(run.id, 9, "FAILED")


def test_a_resource_has_one_lease_per_host(registry: Registry) -> None:
    lease = registry.insert_lease("port", "8000", ME, ttl_s=60)
    assert lease is not None and lease.owner == ME and lease.host == "here"
    assert registry.insert_lease("port", "8000", OTHER, ttl_s=60) is None
    assert registry.insert_lease("port", "8000", OTHER, ttl_s=60, host="there") is not None
    assert registry.insert_lease("gpu", "8000", OTHER, ttl_s=60) is not None
    assert registry.delete_lease(lease.id)
    assert not registry.delete_lease(lease.id)
    assert registry.insert_lease("port", "8000", OTHER, ttl_s=60) is not None


def test_several_resources_are_leased_all_or_none(registry: Registry) -> None:
    registry.insert_lease("gpu", "1", OTHER, ttl_s=60)
    rows = registry.insert_leases("gpu", ["0", "1", "2", "3"], 2, ME, ttl_s=60)
    assert rows is not None and [row.resource for row in rows] == ["0", "2"]
    assert registry.insert_leases("gpu", ["0", "1", "2", "3"], 2, ME, ttl_s=60) is None
    assert len(registry.list_leases("gpu")) == 3
    with pytest.raises(RunNotFound):
        registry.insert_leases("gpu", ["3"], 1, ME, ttl_s=60, run_id="nope")


def test_a_lease_expires_unless_renewed_and_stays_taken_until_freed(registry: Registry) -> None:
    lease = registry.insert_lease("port", "8000", ME, ttl_s=-1)
    assert lease is not None
    assert [row.id for row in registry.expired_leases(host="here")] == [lease.id]
    assert registry.expired_leases(host="there") == []
    assert registry.insert_lease("port", "8000", OTHER, ttl_s=60) is None
    assert registry.renew(lease.id, 60)
    assert registry.expired_leases() == []
    assert registry.set_lease_child(lease.id, 4711, 3.25)
    assert (registry.list_leases()[0].child_pid, registry.list_leases()[0].child_start_time) == (4711, 3.25)
    registry.delete_lease(lease.id)
    assert not registry.renew(lease.id, 60)
    assert not registry.set_lease_child(lease.id, 1, None)


def test_servers_and_checkpoints_are_listed(registry: Registry) -> None:
    run = registry.create_run("r1", "train-grpo")
    server = registry.record_server(run.id, "student", "http://127.0.0.1:8000", 12, details={"model": "m"})
    registry.record_server(None, "shared", "http://127.0.0.1:8001", 13)
    assert [row.name for row in registry.list_servers(running=True)] == ["student", "shared"]
    registry.end_server(server.id, "killed by SIGKILL")
    registry.end_server(server.id, "exit code 0")
    assert [row.name for row in registry.list_servers(running=True)] == ["shared"]
    assert registry.list_servers(run.id)[0].exit == "killed by SIGKILL"

    registry.record_checkpoint(run.id, 10, "/a")
    registry.record_checkpoint(run.id, 5, "/b")
    registry.record_checkpoint(run.id, 10, "/c", {"reward": 0.5})
    assert [(row.step, row.path, row.details) for row in registry.list_checkpoints(run.id)] == [
        (5, "/b", {}),
        (10, "/c", {"reward": 0.5}),
    ]
    registry.forget_checkpoint(run.id, 5)
    assert [row.step for row in registry.list_checkpoints(run.id)] == [10]


def _contend(url: str, number: int, run_name: str, results: Any) -> None:
    registry = Registry(url)  # the first of these makes the tables
    owner = Owner(number, 1.0, "here")
    try:
        run_id = registry.create_run(run_name, "sft").id
    except RunExists:
        run_id = registry.get_run(run_name).id
    won = [port for port in range(24) if registry.insert_lease("port", str(port), owner, 60)]
    claimed = registry.claim_run(run_id, owner, alive=lambda _: True)
    for step in range(10):
        registry.set_stage(run_id, f"{number}-{step}", {"step": step})
    registry.close()
    results.put((number, won, claimed))


def test_sixteen_writers_neither_fail_nor_share_nor_lose_a_row(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    writers = [context.Process(target=_contend, args=(url, number, "shared", results)) for number in range(1, 17)]
    for writer in writers:
        writer.start()
    seen = [results.get(timeout=240) for _ in writers]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 16
    assert Counter(port for _, won, _ in seen for port in won) == Counter(range(24))
    assert sum(claimed for _, _, claimed in seen) == 1
    registry = Registry(url)
    held = {(row.owner_pid, int(row.resource)) for row in registry.list_leases("port")}
    assert held == {(number, port) for number, won, _ in seen for port in won}
    assert len(registry.get_run("shared").stages) == 160  # no read-modify-write was lost
    registry.close()


def test_the_default_database_lies_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path / "home"))
    assert default_url() == f"sqlite:///{tmp_path}/home/registry.db"
    Registry().close()
    assert (tmp_path / "home" / "registry.db").exists()


def test_an_owner_is_told_from_a_later_process_of_the_same_pid() -> None:
    owner = Owner.current()
    assert owner.pid == os.getpid()
    assert owner.host == socket.gethostname()
    assert owner.start_time > 0
    assert owner == Owner.current()
