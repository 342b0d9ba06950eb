"""A sweep in MLflow: one parent run for its whole life, whose children are the trials' runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.artifacts import quietly
from flows.config import RunConfig
from flows.parent_tracking import ParentTracking
from flows.sweep_config import SweepConfig
from flows.sweep_report import best_so_far
from infra.registry import Registry, RunRow
from infra.registry_records import SweepRow
from infra.tracking import EndStatus, Tracker


class SweepTracking(ParentTracking):
    """The parent run while the sweep works. `trial`: for what all trials share."""

    def __init__(self, registry: Registry, row: SweepRow, trial: RunConfig, folder: Path, config: SweepConfig) -> None:
        self._logged = 0
        tags = {**trial.tags, "loopwright.sweep": row.name, "loopwright.trial": "", "loopwright.metric": config.metric}
        super().__init__(row, folder, trial.tracking, tags, {"sweep": config.model_dump(mode="json")}, registry.update_sweep)

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
