"""`loopwright up`: its services, a flow started through them, Prefect's retry of it, and `down`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from flows import services
from infra.registry import Registry
from tests.flows.runs_for_real import services_up, sft_config, state_of, trigger, wait_for, wait_for_end


@pytest.mark.timeout(900)
def test_a_flow_started_through_the_api_fails_with_its_cause_and_is_retried_to_its_end(home: Path, tmp_path: Path) -> None:
    with services_up(home, tmp_path / "log") as up:
        with httpx.Client(base_url=up.prefect_url, timeout=30.0, trust_env=False) as api:
            _fails_then_finishes(api, tmp_path, up.prefect_url)
        assert httpx.get(f"{up.mlflow_url}/health", trust_env=False).status_code == 200
    assert services.running() is None
    assert Registry().list_leases() == []


def _fails_then_finishes(api: httpx.Client, folder: Path, url: str) -> None:
    deployment = api.get("/deployments/name/sft-long-context/local").raise_for_status().json()
    form = deployment["parameter_openapi_schema"]["definitions"]["SFTRunConfig"]["properties"]
    assert form["max_length"]["minimum"] == 2 and "Longest sequence" in form["max_length"]["description"]
    assert "output_dir" not in form

    # A completion that is a number: the columns are there, so only the trainer finds out.
    config, rows = sft_config(folder, "retried", num_train_epochs=4), folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": 2}) + "\n")
    flow_run = trigger(api, config)
    ended = wait_for_end(api, flow_run)
    failed = Registry().get_run("retried")
    assert (ended["type"], failed.status) == ("FAILED", "FAILED")
    assert "column `completion` holds 2" in str(failed.cause)
    assert ended["message"].splitlines()[0] == str(failed.cause).splitlines()[0]

    # A retry within the second in which the worker sees the process end would be overwritten by its report of a crash.
    log = Path(os.environ["LOOPWRIGHT_HOME"]) / "prefect" / "worker.log"
    wait_for(lambda: "flow_runs.worker - Check the flow run logs" in log.read_text(), "the worker saw the flow's process end")
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    retry = [sys.executable, "-m", "prefect", "flow-run", "retry", flow_run]
    subprocess.run(retry, env={**os.environ, "PREFECT_API_URL": url}, check=True, capture_output=True)
    wait_for(lambda: state_of(api, flow_run)["type"] != "FAILED", "the flow run is retried")
    found = wait_for_end(api, flow_run)
    done = Registry().get_run("retried")
    assert (found["type"], done.status, done.id) == ("COMPLETED", "FINISHED", failed.id), (found["message"], done.cause)
    assert done.prefect_flow_run_id == flow_run
    assert [attempt.status for attempt in Registry().list_attempts(done.id)] == ["FAILED", "FINISHED"]
    artifacts = api.post("/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [flow_run]}}}).json()
    assert {"progress", "mlflow-run", "checkpoint", "result"} <= {artifact["key"] for artifact in artifacts}


def test_the_mlflow_store_appears_whole(tmp_path: Path) -> None:
    """A half-made one could never be opened again, so it is made aside: killed on the way, there is none yet."""
    database = tmp_path / "mlflow.db"
    make = [sys.executable, "-m", "infra.tracking_mlflow", str(database)]
    child = subprocess.Popen(make, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(file.stat().st_size for file in tmp_path.glob(".new-*/mlflow.db")), "tables are being made")
    child.kill()
    child.wait()
    assert not database.exists()
    subprocess.run(make, check=True, capture_output=True)

    from mlflow import MlflowClient

    assert [found.name for found in MlflowClient(f"sqlite:///{database}").search_experiments()] == ["Default"]
