"""Which runs' Prefect states the reaper may end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flows.reaping import SETTLING_S, _nobody_will_end
from infra.registry import Owner, Registry

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
