"""Waiting for a database: a real SQLite file under an exclusive lock, a real Postgres that is stopped and started."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from infra import patience
from infra.patience import open_patiently, out_of_reach, patient, patiently, plain
from infra.registry import Registry, RunNotFound
from infra.registry_writer import RegistryWriter
from tests.support.postgres import PostgresServer
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.1)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr("infra.registry_engine.BUSY_TIMEOUT_S", 0.1)
    return Registry(tmp_path / "registry.db")


def write_all(writer: RegistryWriter) -> None:
    """Progress twice, and two checkpoints, in this order."""
    run_id, registry = writer.run_id, writer.registry
    writer.progress({"step": 1, "loss": 5.0})
    writer.submit(lambda: registry.record_checkpoint(run_id, 1, "/c1"))
    writer.submit(lambda: registry.record_checkpoint(run_id, 2, "/c2"))
    writer.progress({"step": 2})


def check_all(registry: Registry, run_id: str) -> None:
    progress = registry.get_run(run_id).progress
    assert (progress["step"], progress["loss"]) == (2, 5.0)
    assert [row.step for row in registry.list_checkpoints(run_id)] == [1, 2]


def test_what_a_trainer_writes_waits_for_a_locked_sqlite_file(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = registry.create_run("r", "f")
    writer = RegistryWriter(registry, run.id)
    with locked(tmp_path / "registry.db"):
        write_all(writer)
        wait_until(lambda: "out of reach" in caplog.text, what="the writer met the lock")
        assert registry.list_checkpoints(run.id) == []
    writer.close()
    check_all(registry, run.id)


def test_a_flows_call_waits_for_a_locked_sqlite_file(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = registry.create_run("r", "f")
    calls = threading.Thread(target=lambda: patient(registry).set_stage(run.id, "train", {"step": 3}))
    with locked(tmp_path / "registry.db"):
        calls.start()
        wait_until(lambda: "set_stage: out of reach" in caplog.text, what="the call met the lock")
        with pytest.raises(OperationalError, match="locked"):
            plain(patient(registry)).set_stage(run.id, "train", None)
    calls.join(30)
    assert registry.get_run("r").stages == {"train": {"step": 3}}
    assert "back after" in caplog.text


def test_postgres_stopped_and_started_is_waited_for(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOOPWRIGHT_REGISTRY_URL", postgres_url)
    registry = Registry(postgres_url)
    run = registry.create_run("r", "f")
    writer = RegistryWriter(registry, run.id)
    opened: list[Registry] = []
    opening = threading.Thread(target=lambda: opened.append(open_patiently()))
    postgres_server.stop()
    try:
        write_all(writer)
        opening.start()
        wait_until(lambda: caplog.text.count("out of reach") >= 2, what="both met the outage")
    finally:
        postgres_server.start()
    writer.close()
    opening.join(60)
    check_all(opened[0], run.id)
    assert postgres_url.split(":")[2].split("@")[0] not in caplog.text
    opened[0].close()
    registry.close()


def test_a_writer_that_is_closed_in_an_outage_gives_up_in_the_end(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = registry.create_run("r", "f")
    writer = RegistryWriter(registry, run.id)
    with locked(tmp_path / "registry.db"):
        write_all(writer)
        writer.close(timeout_s=0.3)
        assert "the run's last progress is not in it" in caplog.text
        writer._thread.join(30)
        assert not writer._thread.is_alive()
    assert registry.list_checkpoints(run.id) == []


def test_what_is_no_outage_is_raised_at_once(registry: Registry) -> None:
    with pytest.raises(RunNotFound):
        patient(registry).get_run("nobody")
    with pytest.raises(OperationalError, match="no such table"), registry._engine.connect() as connection:
        patiently(lambda: connection.exec_driver_sql("SELECT * FROM missing"))
    assert not out_of_reach(ValueError("locked"))


def test_patience_ends(registry: Registry, tmp_path: Path) -> None:
    calls: list[Any] = []

    def call() -> None:
        calls.append(1)
        raise sqlite3.OperationalError("database is locked")

    with pytest.raises(sqlite3.OperationalError):
        patiently(call, patience_s=0.2)
    assert len(calls) > 1
