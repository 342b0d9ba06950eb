"""Which runs' Prefect states the reaper may end, and which runs it has taken up again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.reaping import FLOW_RUN_VARIABLE, SETTLING_S, _end_half_ended, _is_gone, _nobody_will_end, _resume_lost
from infra.process import carrying
from infra.registry import Owner, Registry
from tests.support.waiting import wait_until

GONE = Owner(2**22 + 1, 1.0, Owner.current().host)  # above the largest pid


@pytest.mark.parametrize(
    ("status", "owner", "age_s", "expected"),
    [
        ("RUNNING", GONE, 0.0, False),  # the reaper's own pass fails it first
        ("FAILED", GONE, 0.0, True),
        ("FINISHED", GONE, 0.0, True),  # killed between its last stage and its report to Prefect
        ("FAILED", Owner.current(), 1000.0, False),  # a retry is taking it up
        ("FINISHED", None, 0.0, False),  # its flow is about to tell Prefect
        ("FINISHED", None, 2 * SETTLING_S, True),
    ],
)
def test_only_flow_runs_that_nobody_will_end(tmp_path: Path, monkeypatch, status, owner, age_s, expected) -> None:
    registry = Registry(tmp_path / "registry.db")
    run = registry.create_run("r", "train-grpo")
    registry.update_run(run.id, status=status, owner=owner)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age_s)
    assert _nobody_will_end(registry.get_run(run.id)) is expected


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


def running_flow_run(deployment: str | None = "d", age_s: float = 2 * SETTLING_S) -> dict[str, Any]:
    began = datetime.fromtimestamp(time.time() - age_s, UTC).isoformat()
    return {"id": "f", "state": {"type": "RUNNING", "timestamp": began}, "deployment_id": deployment}


@pytest.mark.parametrize(("status", "failure"), [("KILLED", None), ("FAILED", "user")])
def test_a_run_whose_flow_was_killed_while_it_told_of_its_end_is_ended_in_mlflow_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Any, failure: str | None
) -> None:
    registry = lost_run(tmp_path, status=status, failure_class=failure)
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr("flows.reaping._end_mlflow", lambda run, status: ended.append((run.name, status)))
    for _ in range(2):
        _end_half_ended(registry)
    assert ended == [("r", status)] and registry.get_run("r").owner is None


def test_a_lost_run_keeps_the_owner_by_which_it_is_known(tmp_path: Path) -> None:
    registry = lost_run(tmp_path)
    _end_half_ended(registry)
    assert registry.get_run("r").owner == GONE


@pytest.mark.parametrize(
    ("facts", "host", "gone"),
    [
        ({}, "127.0.0.1", True),
        ({}, "prefect.example", False),  # its worker may be anywhere
        ({"deployment": None}, "127.0.0.1", False),  # `loopwright run`
        ({"age_s": 0.0}, "127.0.0.1", False),
    ],
)
def test_a_flow_run_without_a_process_or_a_row_is_gone(facts: dict[str, Any], host: str, gone: bool) -> None:
    flow_run = running_flow_run(**facts)
    with httpx.Client(base_url=f"http://{host}:1/api") as client:
        assert _is_gone(flow_run, client) is gone
        sleeper = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        with subprocess.Popen(sleeper, stdin=subprocess.PIPE, env={FLOW_RUN_VARIABLE: "f", "PATH": ""}) as process:
            wait_until(lambda: carrying(FLOW_RUN_VARIABLE, "f") == [process.pid])
            assert not _is_gone(flow_run, client)


def lost_run(folder: Path, **columns: Any) -> Registry:
    registry = Registry(folder / "registry.db")
    run = registry.create_run("r", "train-sft", {"retry": {"infrastructure": 2, "backoff_s": 0}}, prefect_flow_run_id="f")
    registry.update_run(run.id, **{"status": "FAILED", "failure_class": "infrastructure", "owner": GONE} | columns)
    return registry


def test_a_lost_run_is_scheduled_once(tmp_path: Path) -> None:
    registry, prefect = lost_run(tmp_path), FakePrefect()
    with prefect.client() as client:
        assert _resume_lost(registry, client) == ["r"]
        assert _resume_lost(registry, client) == []  # it is scheduled
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
        assert _resume_lost(registry, client) == []
    after = registry.get_run("r")
    assert prefect.given == [] and (after.status, after.owner) == (before.status, before.owner)


def test_a_run_lost_while_it_was_cancelled_is_killed(tmp_path: Path) -> None:
    registry, prefect = lost_run(tmp_path), FakePrefect("CANCELLED")
    with prefect.client() as client:
        assert _resume_lost(registry, client) == []
    run = registry.get_run("r")
    assert (run.status, run.failure_class, run.cause) == ("KILLED", None, "cancelled in Prefect")
