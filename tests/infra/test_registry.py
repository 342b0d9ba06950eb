"""The registry, on SQLite and on Postgres alike."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from infra.errors import InfraError
from infra.registry import (
    URL_VARIABLE,
    Owner,
    Registry,
    RunExists,
    RunNotFound,
    default_url,
)
from tests.infra.registry_writers import PORTS, STAGES, write
from tests.infra.released import fill
from tests.support.postgres import PASSWORD

ME = Owner(pid=100, start_time=1.5, host="here")
OTHER = Owner(pid=200, start_time=2.5, host="here")


def test_a_run_is_found_by_name_and_by_id_and_survives_reopening(registry: Registry, registry_url: str) -> None:
    run = registry.create_run("r1", "train-grpo", {"learning_rate": 1e-6, "nested": {"x": [1, 2]}}, output_dir="/runs/r1")
    again = Registry(registry_url)
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


def test_an_unknown_run_is_named(registry: Registry) -> None:
    assert registry.find_run("nope") is None
    with pytest.raises(RunNotFound, match="'nope'"):
        registry.get_run("nope")
    with pytest.raises(RunNotFound, match="'nope'"):
        registry.progress("nope", {"step": 1})


def test_an_error_does_not_show_the_password(postgres_url: str) -> None:
    registry = Registry(postgres_url)
    with pytest.raises(RunNotFound) as caught:
        registry.get_run("nope")
    assert "***" in str(caught.value) and PASSWORD not in str(caught.value)
    registry.close()
    wrong = postgres_url.replace(PASSWORD, "pass-word-of-mine")
    with pytest.raises(OperationalError) as refused:
        Registry(wrong)
    assert "pass-word-of-mine" not in "".join(traceback.format_exception(refused.value))


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
    assert registry.insert_lease("port", "8000", Owner(200, 2.5, "there"), ttl_s=60) is not None
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
    (row,) = registry.list_leases(host="here")
    assert row.id == lease.id and row.expires_at <= time.time()
    assert registry.list_leases(host="there") == []
    assert registry.insert_lease("port", "8000", OTHER, ttl_s=60) is None
    assert registry.renew(lease.id, 60)
    assert registry.list_leases()[0].expires_at > time.time()
    registry.delete_lease(lease.id)
    assert not registry.renew(lease.id, 60)


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


def test_sixteen_writers_neither_fail_nor_share_nor_lose_a_row(registry_url: str) -> None:
    """They open a file that is not there yet, or on Postgres a database of the released version, at the same moment."""
    if registry_url.startswith("postgresql"):
        fill(registry_url, "0001")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.infra.registry_writers", "alembic.runtime.migration", "alembic.script", "psycopg"])
    results, ready = context.Queue(), context.Barrier(16)
    writers = [context.Process(target=write, args=(registry_url, number, ready, results)) for number in range(1, 17)]
    for writer in writers:
        writer.start()
    seen = [results.get(timeout=240) for _ in writers]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 16
    assert sum(one.migrated for one in seen) == 1
    assert Counter(port for one in seen for port in one.ports) == Counter(PORTS)
    assert sum(one.claimed_run for one in seen) == sum(one.claimed_sweep for one in seen) == 1
    registry = Registry(registry_url)
    held = {(row.owner_pid, int(row.resource)) for row in registry.list_leases("port") if row.run_id is None}
    assert held == {(one.number, port) for one in seen for port in one.ports}
    # No read-modify-write was lost.
    run = registry.get_run("shared")
    assert len(run.stages) == 16 * STAGES
    assert registry.costs(run.id) == pytest.approx({"gpu_s/trainer": 16 * 9.0, "usd": 16 * 0.9})
    # What all recorded is there once.
    assert len({one.artefacts for one in seen}) == 1
    (dataset,) = registry.find_artefacts("data.jsonl")
    assert len(dataset.details) == 16
    assert [row.id for row in registry.parents(seen[0].artefacts[1])] == [dataset.id]
    assert [row.number for row in registry.list_trials(registry.get_sweep("shared").id)] == list(range(17))
    registry.close()


def test_the_default_database_lies_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path / "home"))
    assert default_url() == f"sqlite:///{tmp_path}/home/registry.db"
    Registry().close()
    assert (tmp_path / "home" / "registry.db").exists()


def test_the_environment_names_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "postgresql+psycopg://me:secret@db/registry")
    assert default_url() == "postgresql+psycopg://me:secret@db/registry"
    monkeypatch.setenv(URL_VARIABLE, str(tmp_path / "mine.db"))
    registry = Registry()
    assert registry.url == f"sqlite:///{tmp_path}/mine.db" and (tmp_path / "mine.db").exists()
    registry.close()
    for written in ("postgres://me@db/registry", "postgresql://me@db/registry"):
        monkeypatch.setenv(URL_VARIABLE, written)
        assert default_url() == "postgresql+psycopg://me@db/registry"
    with pytest.raises(InfraError, match=r"nonsense://me:\*\*\*@db is no address of a database"):
        Registry("nonsense://me:secret@db")


def test_runs_are_listed_by_what_is_asked(registry: Registry) -> None:
    sweep = registry.create_sweep("s", {})
    for number, (flow, status, tags) in enumerate(
        [("sft", "FINISHED", {"team": "a"}), ("sft", "FAILED", {"team": "b", "why": 'a "b" c'}), ("grpo", "FINISHED", {})]
    ):
        run = registry.create_run(f"r{number}", flow, {"n": number}, tags=tags)
        registry.update_run(run.id, status=status)
        if number:
            registry.record_trial(sweep.id, number, f"s:{number}:1", run_id=run.id)

    def names(**wanted: Any) -> list[str]:
        return [row.name for row in registry.list_runs(**wanted)]

    assert names() == ["r2", "r1", "r0"]
    assert names(limit=2) == ["r2", "r1"]
    assert names(flow="sft") == ["r1", "r0"]
    assert names(flow="sft", status="FINISHED") == ["r0"]
    assert names(tags={"team": "b"}) == names(tags={"team": "b", "why": 'a "b" c'}) == ["r1"]
    assert names(tags={"team": "b", "why": "x"}) == names(tags={"teams": "b"}) == []
    assert names(sweep="s") == names(sweep=sweep.id) == ["r2", "r1"]
    assert names(sweep="other") == []
    (row,) = registry.list_runs(light=True, limit=1)
    assert (row.name, row.tags, row.progress) == ("r2", {}, {})
    with pytest.raises(Exception, match="config"):
        _ = row.config


def test_children_of_a_run(registry: Registry) -> None:
    parent = registry.create_run("parent", "specialise")
    child = registry.create_run("child", "sft", parent_run_id=parent.id)
    assert [row.name for row in registry.list_runs(parent=parent.id)] == ["child"]
    with pytest.raises(RunNotFound, match="'nope'"):
        registry.create_run("other", "sft", parent_run_id="nope")
    assert registry.get_run("child").parent_run_id == parent.id and child.id != parent.id


def test_equal_configs_have_equal_hashes(registry: Registry) -> None:
    one = registry.create_run("a", "sft", {"x": 1, "y": {"z": [1.5, None]}})
    two = registry.create_run("b", "sft", {"y": {"z": [1.5, None]}, "x": 1})
    other = registry.create_run("c", "sft", {"x": 2, "y": {"z": [1.5, None]}})
    assert one.config_hash == two.config_hash != other.config_hash
    assert registry.create_run("d", "sft", {"x": 2}, config_hash="given").config_hash == "given"


def test_attempts_know_where_they_ran(registry: Registry) -> None:
    run = registry.create_run("r1", "sft", prefect_flow_run_id="pf-7")
    assert (registry.start_attempt(run.id).host, registry.list_attempts(run.id)[0].prefect_flow_run_id) == (
        socket.gethostname(),
        "pf-7",
    )


def test_checkpoints_are_pinned_and_have_addresses(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    registry.record_checkpoint(run.id, 5, "/a", metrics={"reward": 0.5})
    assert registry.update_checkpoint(run.id, 5, pinned=True, uri="s3://bucket/a")
    assert not registry.update_checkpoint(run.id, 6, pinned=True)
    (row,) = registry.list_checkpoints(run.id)
    assert (row.pinned, row.uri, row.metrics) == (True, "s3://bucket/a", {"reward": 0.5})
    registry.record_checkpoint(run.id, 5, "/b")
    (row,) = registry.list_checkpoints(run.id)
    assert (row.path, row.pinned, row.uri, row.metrics) == ("/b", True, None, {})
    with pytest.raises(ValueError, match="no column 'colour'"):
        registry.update_checkpoint(run.id, 5, colour="red")


def test_an_owner_is_told_from_a_later_process_of_the_same_pid() -> None:
    owner = Owner.current()
    assert owner.pid == os.getpid()
    assert owner.host == socket.gethostname()
    assert owner.start_time > 0
    assert owner == Owner.current()
