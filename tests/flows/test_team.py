"""Registry, MLflow and, where its extension is there, Prefect on one real Postgres, by settings alone: a run to its end.

Then the backup that docs/operations.md describes: dumped, restored into another database, and read again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from flows import services
from infra.registry import Registry
from tests.flows.runs_for_real import processes, services_up, sft_config, start, trigger, wait_for_end
from tests.support.postgres import PASSWORD, PostgresServer


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_databases_are_on_one_postgres(
    home: Path,
    tmp_path: Path,
    postgres_server: PostgresServer,
    postgres_database: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry_url, prefect_url, mlflow_url = postgres_database(), postgres_database(), postgres_database()
    monkeypatch.setenv("LOOPWRIGHT_REGISTRY_URL", registry_url)
    if in_postgres := _has_trigrams(prefect_url):
        monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", prefect_url.replace("+psycopg", "+asyncpg"))
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", mlflow_url)
    with services_up(home, tmp_path / "up.out") as up:
        assert up.tracked and not up.shared
        _run(up.prefect_url, tmp_path)
        run = Registry(registry_url).get_run("team")
        assert (run.status, run.cause) == ("FINISHED", None)
        found = httpx.get(f"{up.mlflow_url}/api/2.0/mlflow/runs/get", params={"run_id": run.mlflow_run_id}, trust_env=False)
        assert found.json()["run"]["info"]["status"] == "FINISHED"
        listed = {"run_id": run.mlflow_run_id, "path": "provenance"}
        files = httpx.get(f"{up.mlflow_url}/api/2.0/mlflow/artifacts/list", params=listed, trust_env=False).json()
        assert [file["path"] for file in files["files"]] == ["provenance/provenance-1.json"], "artefacts go through the server"
        _another_machine_starts_only_a_worker(up, tmp_path / "other")
    assert not (home / "registry.db").exists() and not (home / "mlflow" / "mlflow.db").exists()
    assert (home / "prefect" / "prefect.db").exists() is not in_postgres
    holding = [path for path in home.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert holding == [], "the password is in no file"
    _backup_and_restore(postgres_server, registry_url, postgres_database())


def _another_machine_starts_only_a_worker(up: services.Up, other: Path) -> None:
    """A home of its own stands for the machine; the servers that its environment names are used, none is started."""
    other.mkdir()
    log = other / "up.out"
    there = {"LOOPWRIGHT_HOME": str(other), "PREFECT_API_URL": up.prefect_url, "MLFLOW_TRACKING_URI": str(up.mlflow_url)}
    try:
        assert start("up", log=log, **there).wait(700) == 0, log.read_text()
        found = json.loads((other / "up.json").read_text())
        assert (found["prefect_url"], found["prefect_port"], found["mlflow_url"]) == (up.prefect_url, None, None)
        assert processes(other, "worker start") and not processes(other, "uvicorn") and not processes(other, "mlflow server")
    finally:
        assert start("down", log=log, **there).wait(120) == 0, log.read_text()


def _has_trigrams(url: str) -> bool:
    """Prefect's tables want the extension pg_trgm; with a Postgres that was built without it, Prefect stays on SQLite."""
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        found = connection.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'pg_trgm'").fetchone()
    return found is not None


def _run(prefect_url: str, folder: Path) -> None:
    with httpx.Client(base_url=prefect_url, timeout=60.0, trust_env=False) as api:
        flow_run = trigger(api, sft_config(folder, "team", num_train_epochs=4))
        state = wait_for_end(api, flow_run, 900)
        assert state["type"] == "COMPLETED", state["message"]


def _backup_and_restore(server: PostgresServer, source: str, target: str) -> None:
    dump = server.folder / "registry.dump"
    os.environ["PGPASSWORD"] = PASSWORD
    try:
        plain = [url.replace("+psycopg", "").replace(f":{PASSWORD}", "") for url in (source, target)]
        tool = server._programs
        subprocess.run([tool / "pg_dump", "--format=custom", "--no-owner", f"--file={dump}", plain[0]], check=True)
        subprocess.run([tool / "pg_restore", "--no-owner", "--exit-on-error", f"--dbname={plain[1]}", dump], check=True)
    finally:
        del os.environ["PGPASSWORD"]
    assert Registry(target).get_run("team").status == "FINISHED"
