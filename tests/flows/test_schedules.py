"""Schedules that fire, on a real server with a real worker: one of `loopwright deploy`, and one added on Prefect's pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.registry import Registry
from tests.flows.runs_for_real import services_up, sft_config, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
PATIENCE_S = 900.0


@pytest.fixture
def api(home: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    with (
        services_up(home, tmp_path / "up.out") as up,
        httpx.Client(base_url=up.prefect_url, timeout=60.0, trust_env=False) as client,
    ):
        yield client


def deployment(api: httpx.Client, name: str) -> dict[str, Any]:
    return api.get(f"/deployments/name/{name}").raise_for_status().json()


def fired(api: httpx.Client, deployment_id: str, count: int) -> list[dict[str, Any]]:
    """The first `count` flow runs that the schedule started, once they have ended."""
    query = {
        "deployments": {"id": {"any_": [deployment_id]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}},
        "sort": "EXPECTED_START_TIME_ASC",
    }

    def ended() -> list[dict[str, Any]] | None:
        found = api.post("/flow_runs/filter", json=query).raise_for_status().json()
        return found[:count] if len(found) >= count else None

    return wait_for(ended, f"{count} scheduled flow runs end", PATIENCE_S)


def write(api: httpx.Client, method: str, path: str, body: Any) -> None:
    """Again and again while Prefect's database is busy (503), as Prefect's own clients do."""
    wait_for(lambda: (found := api.request(method, path, json=body)).status_code != 503 and found.raise_for_status(), path)


def pause(api: httpx.Client, deployment_id: str) -> None:
    (schedule,) = api.get(f"/deployments/{deployment_id}/schedules").raise_for_status().json()
    write(api, "PATCH", f"/deployments/{deployment_id}/schedules/{schedule['id']}", {"active": False})


def test_schedules_start_flow_runs_that_a_worker_takes_to_their_end(api: httpx.Client, home: Path, tmp_path: Path) -> None:
    config = sft_config(tmp_path, "", rows=2)
    del config["name"]  # a schedule starts a new run each time
    path, log = tmp_path / "often.yaml", tmp_path / "deploy.out"
    path.write_text(yaml.safe_dump(config))
    asked = ("deploy", "sft", "--config", str(path), "--schedule", "* * * * *")
    assert start(*asked, log=log).wait(120) == 0, log.read_text()
    training = deployment(api, "sft-long-context/often")

    # As Prefect's pages do it, every few seconds.
    reaper = deployment(api, "reap/local")["id"]
    every = {"schedule": {"interval": 5.0, "timezone": "UTC"}, "active": True}
    write(api, "POST", f"/deployments/{reaper}/schedules", [every])
    reaped = fired(api, reaper, 2)
    pause(api, reaper)
    assert [(run["state"]["type"], run["auto_scheduled"]) for run in reaped] == [("COMPLETED", True)] * 2
    assert len({run["expected_start_time"] for run in reaped}) == 2

    (trained,) = fired(api, training["id"], 1)
    pause(api, training["id"])
    assert (trained["state"]["type"], trained["auto_scheduled"]) == ("COMPLETED", True), trained["state"]
    run = Registry().get_run(trained["name"])
    assert (run.status, run.prefect_flow_run_id, run.stages["train"]["step"]) == ("FINISHED", trained["id"], 2), run.cause
