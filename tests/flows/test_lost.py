"""Which lost runs and sweeps are scheduled again, once, and which are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.lost import resume_lost
from flows.sweep_reaping import reap_sweeps
from infra.registry import Owner, Registry
from infra.registry_records import SweepRow

GONE = Owner(2**22 + 1, 1.0, Owner.current().host)  # above the largest pid


class FakePrefect:
    """One flow run, and the states it was given."""

    def __init__(self, kind: str = "CRASHED", deployment: str | None = "d", runs: int = 1) -> None:
        self.flow_run = {"id": "f", "state": {"type": kind}, "deployment_id": deployment, "run_count": runs}
        self.given: list[dict[str, Any]] = []

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://prefect", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=self.flow_run) if request.url.path == "/flow_runs/f" else httpx.Response(404)
        assert request.url.path == "/flow_runs/f/set_state"
        self.given.append(json.loads(request.content)["state"])
        self.flow_run["state"] = self.given[-1]
        return httpx.Response(201, json={})


def lost_run(folder: Path, **columns: Any) -> Registry:
    registry = Registry(folder / "registry.db")
    retry = {"infrastructure": 2, "backoff_s": 0}
    run = registry.create_run("r", "sft-long-context", {"retry": retry}, prefect_flow_run_id="f")
    registry.update_run(run.id, **{"status": "FAILED", "failure_class": "infrastructure", "owner": GONE} | columns)
    return registry


def test_a_lost_run_is_scheduled_once(tmp_path: Path) -> None:
    registry, prefect = lost_run(tmp_path), FakePrefect()
    with prefect.client() as client:
        assert resume_lost(registry, client) == ["r"]
        assert resume_lost(registry, client) == []  # it is scheduled
    assert [state["name"] for state in prefect.given] == ["AwaitingRetry"]
    run = registry.get_run("r")
    assert (run.status, run.owner) == ("FAILED", GONE)  # until a worker takes it up


@pytest.mark.parametrize(
    ("columns", "prefect"),
    [
        ({}, FakePrefect(runs=3)),  # its tries are used up
        ({}, FakePrefect(deployment=None)),  # `loopwright run`: no worker would take it up
        ({}, FakePrefect("RUNNING")),  # taken up just now
        ({}, FakePrefect("SCHEDULED")),
        ({"failure_class": "user"}, FakePrefect()),  # the user's to mend
        ({"status": "KILLED", "failure_class": None}, FakePrefect()),
        ({"owner": None}, FakePrefect()),  # given up by its flow, which used up its tries
        ({"owner": Owner.current()}, FakePrefect()),
        ({"prefect_flow_run_id": "of a server that is gone"}, FakePrefect()),
    ],
)
def test_what_is_not_scheduled_again(tmp_path: Path, columns: dict[str, Any], prefect: FakePrefect) -> None:
    registry = lost_run(tmp_path, **columns)
    before = registry.get_run("r")
    with prefect.client() as client:
        assert resume_lost(registry, client) == []
    after = registry.get_run("r")
    assert prefect.given == [] and (after.status, after.owner) == (before.status, before.owner)


@pytest.mark.parametrize(("runs", "resumed"), [(1, ["r"]), (2, ["r"]), (3, [])])
def test_a_lost_recipe_goes_on_as_often_as_its_own_retries_say_whatever_its_stages_may(
    tmp_path: Path, runs: int, resumed: list[str]
) -> None:
    retry = {"infrastructure": 0, "lost": 2, "backoff_s": 0}
    registry = lost_run(tmp_path, config={"type": "recipe", "retry": retry})
    with FakePrefect(runs=runs).client() as client:
        assert resume_lost(registry, client) == resumed


def test_a_run_lost_while_it_was_cancelled_is_killed(tmp_path: Path) -> None:
    registry, prefect = lost_run(tmp_path), FakePrefect("CANCELLED")
    with prefect.client() as client:
        assert resume_lost(registry, client) == []
    run = registry.get_run("r")
    assert (run.status, run.failure_class, run.cause) == ("KILLED", None, "cancelled in Prefect")


def lost_sweep(folder: Path, retry: dict[str, Any] | None = None, **columns: Any) -> tuple[Registry, SweepRow]:
    """As the reaper leaves one."""
    registry = Registry(folder / "registry.db")
    row = registry.create_sweep("s", {"retry": {"lost": 2, "backoff_s": 0} if retry is None else retry})
    registry.update_sweep(row.id, status="RUNNING", owner=GONE, prefect_flow_run_id="f")
    assert reap_sweeps(registry) == ["s"]
    return registry, registry.update_sweep(row.id, **columns)


@pytest.mark.parametrize(("retry", "runs"), [(None, 1), (None, 2), ({}, 3)])
def test_a_lost_sweep_is_scheduled_once(home: Path, tmp_path: Path, retry: dict[str, Any] | None, runs: int) -> None:
    (registry, row), prefect = lost_sweep(tmp_path, retry), FakePrefect(runs=runs)
    with prefect.client() as client:
        assert resume_lost(registry, client) == ["s"]
        assert resume_lost(registry, client) == []  # it is scheduled
    assert [state["name"] for state in prefect.given] == ["AwaitingRetry"]
    assert registry.get_sweep("s").owner == row.owner == GONE  # until a worker takes it up


@pytest.mark.parametrize(
    ("columns", "prefect"),
    [
        ({}, FakePrefect(runs=3)),  # its tries are used up
        ({}, FakePrefect(deployment=None)),  # `loopwright sweep run`: no worker would take it up
        ({}, FakePrefect("RUNNING")),
        ({"cause": "5 trials failed in a row (limits.failed_trials)"}, FakePrefect()),  # by its own word, killed just after
        ({"status": "KILLED", "cause": "stopped by SIGTERM"}, FakePrefect()),
        ({"owner": None}, FakePrefect()),
        ({"owner": Owner.current()}, FakePrefect()),  # somebody resumes it now
        ({"prefect_flow_run_id": "of a server that is gone"}, FakePrefect()),
    ],
)
def test_what_sweep_is_not_scheduled_again(home: Path, tmp_path: Path, columns: dict[str, Any], prefect: FakePrefect) -> None:
    registry, before = lost_sweep(tmp_path, **columns)
    with prefect.client() as client:
        assert resume_lost(registry, client) == []
    after = registry.get_sweep("s")
    assert prefect.given == [] and (after.status, after.owner, after.cause) == (before.status, before.owner, before.cause)


def test_a_sweep_lost_while_it_was_cancelled_is_killed(home: Path, tmp_path: Path) -> None:
    (registry, _), prefect = lost_sweep(tmp_path), FakePrefect("CANCELLED")
    with prefect.client() as client:
        assert resume_lost(registry, client) == []
    row = registry.get_sweep("s")
    assert (row.status, row.cause) == ("KILLED", "cancelled in Prefect")
