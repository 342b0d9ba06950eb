"""Which runs' Prefect states the reaper may end."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.reaping import FLOW_RUN_VARIABLE, SETTLING_S, _end_half_ended, _is_gone, _nobody_will_end
from infra.process import carrying
from infra.registry import Owner, Registry
from tests.flows.test_lost import GONE, lost_run
from tests.support.waiting import wait_until


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


def running_flow_run(deployment: str | None = "d", age_s: float = 2 * SETTLING_S) -> dict[str, Any]:
    began = datetime.fromtimestamp(time.time() - age_s, UTC).isoformat()
    return {"id": "f", "state": {"type": "RUNNING", "timestamp": began}, "deployment_id": deployment}


@pytest.mark.parametrize(("status", "failure"), [("KILLED", None), ("FAILED", "user")])
def test_a_run_whose_flow_was_killed_while_it_told_of_its_end_is_ended_in_mlflow_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Any, failure: str | None
) -> None:
    registry = lost_run(tmp_path, status=status, failure_class=failure)
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr("flows.reaping.end_run_in_mlflow", lambda run, status: ended.append((run.name, status)))
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
