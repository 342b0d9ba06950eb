"""Runs that ended while MLflow was away are sent by themselves when it is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import leftovers
from flows.leftovers import Leftovers
from infra.outbox import leftover
from infra.registry import Owner, Registry
from infra.tracking import Tracker
from tests.infra.fake_tracking import FakeMlflow
from tests.support.waiting import wait_until


def ended_run(registry: Registry, folder: Path, uri: str, **columns: object) -> Path:
    """A run that trained a step without ever reaching MLflow."""
    server = FakeMlflow()
    server.down = True
    tracker = Tracker(folder, uri, "left", folder.name, system_metrics_s=0, backend=server.connect)
    tracker.start({"a": 1})
    tracker.log(1, {"loss": 1.0})
    assert not tracker.close("FINISHED", timeout_s=0.0)
    run = registry.create_run(folder.name, "sft-long-context", {}, output_dir=str(folder))
    registry.update_run(run.id, **{"status": "FINISHED", **columns})
    return folder


@pytest.mark.filterwarnings("ignore")  # MLflow's and its database library's own
def test_what_waits_is_sent_one_folder_at_a_time_and_a_run_at_work_is_left_alone(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, uri = Registry(), f"sqlite:///{tmp_path}/mlflow.db"
    done = ended_run(registry, tmp_path / "done", uri)
    unreachable = ended_run(registry, tmp_path / "unreachable", "http://127.0.0.1:9")
    at_work = ended_run(registry, tmp_path / "at-work", uri, status="RUNNING", owner=Owner.current())
    sender = Leftovers(registry)
    try:
        monkeypatch.setattr(leftovers, "FIRST_PAUSE_S", 3600.0)
        started = [wait_until(sender.send, 240, "the first folder"), wait_until(sender.send, 240, "the second folder")]
        assert sorted(filter(None, started)) == [done, unreachable]
        wait_until(lambda: not leftover(done / "tracking"), 240, "it was sent")
        assert leftover(unreachable / "tracking") and leftover(at_work / "tracking")
        assert sender._child is None or sender.send() is None  # what failed has its pause
    finally:
        sender.close()

    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments() if e.name == "left"])
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 1.0)
