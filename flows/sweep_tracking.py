"""A sweep in MLflow: one parent run for its whole life, whose children are the trials' runs."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from flows.artifacts import quietly
from flows.config import RunConfig
from flows.sweep_config import SweepConfig
from flows.sweep_report import best_so_far
from infra.registry import Registry, RunRow
from infra.registry_records import SweepRow
from infra.tracking import EndStatus, Tracker, default_uri
from infra.tracking_tags import PARENT_TAG
from trainers.metrics import spec_of
from trainers.references import resolve

log = logging.getLogger(__name__)
PARENT_WAIT_S = 30.0


def tracking_uri(config: RunConfig) -> str:
    return resolve(config.tracking.uri) or default_uri()


class SweepTracking:
    """The parent run while the sweep works. MLflow out of reach costs nothing but that children are tied to it later."""

    def __init__(self, registry: Registry, row: SweepRow, trial: RunConfig, folder: Path, config: SweepConfig) -> None:
        self._logged = 0
        self._tracker = Tracker(
            folder,
            tracking_uri(trial),
            trial.tracking.experiment,
            str(row.name),
            row.mlflow_run_id,
            {**trial.tags, "loopwright.sweep": row.name, "loopwright.trial": "", "loopwright.metric": config.metric},
            check=spec_of,
            on_run_id=lambda run_id: quietly(lambda: registry.update_sweep(row.id, mlflow_run_id=run_id), "the registry"),
            system_metrics_s=0,
        )
        self._tracker.start({"sweep": config.model_dump(mode="json")}, resume_step=0)

    def parent(self) -> str | None:
        """Id of the parent run; None if MLflow does not answer in time."""
        deadline = time.monotonic() + PARENT_WAIT_S
        while (run_id := self._tracker.run_id) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return run_id

    def show(self, found: dict[str, Any]) -> None:
        """The values of finished trials and the best so far, the step being how many have finished."""
        line = best_so_far(found)
        for place, (value, best) in enumerate(line[self._logged :], start=self._logged + 1):
            self._tracker.log(place, {"sweep/value": value, "sweep/best": best})
            self._tracker.commit(place)
        self._logged = len(line)
        if best := found["best"]:
            self._tracker.set_tags({"loopwright.best_trial": best["run"], "loopwright.best_value": f"{best['value']:.6g}"})
            self._tracker.set_tags({f"loopwright.best.{name}": str(value)[:500] for name, value in best["params"].items()})

    def end(self, status: EndStatus, cause: str | None, report: Path | None) -> None:
        if report is not None:
            self._tracker.log_artifact_dir(report, "sweep")
        self._tracker.close(status, cause)


def mark_pruned(registry: Registry, run: RunRow, cause: str, uri: str) -> None:
    """A trial that was stopped says so: KILLED, with the cause, in the registry and in MLflow."""
    registry.update_run(run.id, status="KILLED", failure_class=None, cause=cause)
    if run.output_dir is None:
        return

    def tell() -> None:
        tracker = Tracker(str(run.output_dir), uri, run_name=run.name, run_id=run.mlflow_run_id, system_metrics_s=0)
        tracker.set_tags({"loopwright.pruned": cause})
        tracker.close("KILLED", cause, timeout_s=10.0)

    quietly(tell, "MLflow")


def tie_children(parent: str, children: list[RunRow], uri: str, experiment: str) -> None:
    """Children that began while MLflow was away, so without knowing their parent, are tied to it."""
    from infra.tracking_mlflow import MlflowBackend

    untied = [run for run in children if run.mlflow_run_id and run.config.get("tags", {}).get(PARENT_TAG) != parent]
    if untied:
        backend = MlflowBackend(uri, experiment)
        for run in untied:
            backend.set_tags(str(run.mlflow_run_id), {PARENT_TAG: parent})
