"""Databases of every released version come forward whole, once, and never half."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

import infra.migrations as migrations
from infra.migrations import HEAD, VERSION_TABLE, SchemaRefused
from infra.registry import Owner, Registry
from infra.registry_core import full_url
from infra.registry_engine import open_engine
from infra.registry_models import Base
from tests.infra.released import RELEASED, execute, fill


def schema(url: str) -> dict[str, Any]:
    """Tables with columns, indices and constraints, and the version."""
    engine = open_engine(full_url(url))
    look = inspect(engine)
    found: dict[str, Any] = {}
    for table in look.get_table_names():
        columns = [(column["name"], str(column["type"]), column["nullable"]) for column in look.get_columns(table)]
        keys = [(key["constrained_columns"], key["referred_table"], key["options"]) for key in look.get_foreign_keys(table)]
        unique = sorted(constraint["column_names"] for constraint in look.get_unique_constraints(table))
        indices = sorted(str(index["name"]) for index in look.get_indexes(table))
        primary = look.get_pk_constraint(table)["constrained_columns"]
        found[table] = (columns, sorted(keys, key=str), unique, primary, indices)
    with engine.connect() as connection:
        found["version"] = migrations.version_of(connection)
    engine.dispose()
    return found


@pytest.mark.parametrize("version", RELEASED)
def test_every_released_version_comes_forward_with_its_rows(database: Callable[[], str], version: str) -> None:
    old, new = database(), database()
    fill(old, version)
    registry = Registry(old)
    run = registry.get_run("grpo-first")
    assert (run.id, run.status, run.failure_class, run.cause) == ("0a1b", "FAILED", "memory", "out of memory: 12 GiB")
    assert (run.config, run.stages) == (
        {"type": "grpo", "learning_rate": 1e-6},
        {"evaluate_before": {"accuracy_before": 0.25}},
    )
    assert (run.progress["step"], run.created_at, run.tags, run.parent_run_id) == (40, 1700000000.25, {}, None)
    assert registry.get_run("sft-second").owner == Owner(4711, 12.5, "here")
    assert [(row.number, row.traceback, row.host) for row in registry.list_attempts("0a1b")] == [(1, "Traceback …", None)]
    assert [(row.resource, row.run_id, row.child_pid) for row in registry.list_leases()] == [("23456", "0a1c", 4712)]
    assert [(row.name, row.details, row.exit) for row in registry.list_servers("0a1b")] == [
        ("student-0", {"model": "tiny"}, "exit code 0")
    ]
    (checkpoint,) = registry.list_checkpoints("0a1b")
    assert (checkpoint.step, checkpoint.details, checkpoint.pinned, checkpoint.uri, checkpoint.metrics) == (
        *(40, {"reward": 0.5}, False),
        *(None, {}),
    )
    # And it is as good as a new one.
    registry.add_costs("0a1b", 1, {"gpu_s/trainer": 3.0})
    registry.record_checkpoint("0a1b", 40, "/again")
    registry.close()
    Registry(new).close()
    assert schema(old) == schema(new)
    assert schema(old)["version"] == HEAD


def test_the_first_step_makes_what_was_released_before_there_were_versions(
    database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = database(), database()
    fill(old, "0001")
    monkeypatch.setattr(migrations, "HEAD", "0001")
    Registry(new).close()
    made = schema(new)
    assert made.pop(VERSION_TABLE) and made.pop("version") == "0001"
    released = schema(old)
    assert released.pop("version") is None
    assert made == released


def test_models_and_migrations_say_the_same(database: Callable[[], str]) -> None:
    registry = Registry(database())
    sqlite = registry._engine.dialect.name == "sqlite"

    def included(thing: Any, _name: str | None, kind: str, *_: Any) -> bool:
        # Of a key that was added to a SQLite table SQLAlchemy does not see what happens on delete: asked for below.
        return not (sqlite and kind == "foreign_key_constraint" and thing.column_keys == ["parent_run_id"])

    with registry._engine.connect() as connection:
        options = {"version_table": VERSION_TABLE, "include_object": included}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []
        if sqlite:
            key = connection.exec_driver_sql("PRAGMA foreign_key_list(runs)").mappings().one()
            assert (key["from"], key["table"], key["to"], key["on_delete"]) == ("parent_run_id", "runs", "id", "SET NULL")
    registry.close()


def test_the_head_is_the_newest_file() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == HEAD


def test_opening_again_does_not_even_import_alembic(tmp_path: Path) -> None:
    Registry(tmp_path / "registry.db").close()
    code = "import sys; from infra.registry import Registry; Registry(sys.argv[1]).list_runs()"
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'alembic' not in sys.modules", str(tmp_path / "registry.db")], check=True
    )


def test_a_newer_database_is_refused_with_what_to_do_and_without_its_password(database: Callable[[], str]) -> None:
    url = database()
    Registry(url).close()
    execute(url, f"UPDATE {VERSION_TABLE} SET version_num = '0999'")
    before = schema(url)
    with pytest.raises(SchemaRefused, match=r"has version 0999, made by a newer Loopwright.*install the newer one") as caught:
        Registry(url)
    assert "pg-" not in str(caught.value)
    assert schema(url) == before


def test_somebody_elses_tables_are_left_alone(database: Callable[[], str]) -> None:
    url = database()
    execute(url, "CREATE TABLE runs (run_uuid VARCHAR(32) PRIMARY KEY, experiment_id INTEGER)")  # as MLflow has
    before = schema(url)
    with pytest.raises(SchemaRefused, match=r"tables of another program \(runs\).*LOOPWRIGHT_REGISTRY_URL"):
        Registry(url)
    assert schema(url) == before


def test_beside_another_programs_alembic_and_trials(database: Callable[[], str]) -> None:
    """Optuna keeps its studies in the same database."""
    url = database()
    execute(url, "CREATE TABLE alembic_version (version_num VARCHAR(32))", "INSERT INTO alembic_version VALUES ('v4.0.a')")
    execute(url, "CREATE TABLE trials (trial_id INTEGER PRIMARY KEY)")
    Registry(url).close()
    Registry(url).close()
    engine = open_engine(full_url(url))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "v4.0.a"
    engine.dispose()


@pytest.mark.parametrize("stop_before", [1, 12, 19])
def test_a_killed_migration_leaves_the_version_that_was_there(database: Callable[[], str], stop_before: int) -> None:
    """SIGKILL before one of its statements: the columns, the tables, the last of them."""
    url = database()
    fill(url, "0001")
    before = schema(url)
    command = [sys.executable, "-m", "tests.infra.migration_steps", url]
    process = subprocess.Popen([*command, str(stop_before)], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None and process.stdout.readline() == "stopped\n"
    finally:
        process.kill()
        process.communicate()
    assert schema(url) == before
    Registry(url).close()
    assert schema(url)["version"] == HEAD
