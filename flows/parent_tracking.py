"""The MLflow run of a flow whose runs are its children: of a sweep, of a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flows.artifacts import quietly
from flows.config import TrackingConfig
from infra.registry import RunRow
from infra.registry_records import SweepRow
from infra.tracking import Tracker, default_uri
from infra.tracking_tags import PARENT_TAG
from trainers.metrics import spec_of
from trainers.references import resolve

PARENT_WAIT_S = 30.0


def tracking_uri(tracking: TrackingConfig) -> str:
    return resolve(tracking.uri) or default_uri()


class ParentTracking:
    """One run for the whole life of `row`. MLflow out of reach costs nothing but that children are tied to it later.

    Args:
        params: what is logged as the run's.
        note: keeps columns of the row in the registry, where the run's id goes.
    """

    def __init__(
        self,
        row: RunRow | SweepRow,
        folder: Path,
        tracking: TrackingConfig,
        tags: Mapping[str, str],
        params: dict[str, Any],
        note: Callable[..., object],
    ) -> None:
        self._tracker = Tracker(
            folder,
            tracking_uri(tracking),
            tracking.experiment,
            row.name,
            row.mlflow_run_id,
            dict(tags),
            check=spec_of,
            on_run_id=lambda run_id: quietly(lambda: note(row.id, mlflow_run_id=run_id), "the registry"),
            system_metrics_s=0,
        )
        self._tracker.start(params, resume_step=0)

    def parent(self) -> str | None:
        """Id of the run; None if MLflow does not answer in time."""
        deadline = time.monotonic() + PARENT_WAIT_S
        while (run_id := self._tracker.run_id) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return run_id


def tie_children(parent: str, children: list[RunRow], tracking: TrackingConfig) -> None:
    """Children that began while MLflow was away, so without knowing their parent, are tied to it."""
    from infra.tracking_mlflow import MlflowBackend

    untied = [run for run in children if run.mlflow_run_id and run.config.get("tags", {}).get(PARENT_TAG) != parent]
    if untied:
        backend = MlflowBackend(tracking_uri(tracking), tracking.experiment)
        for run in untied:
            backend.set_tags(str(run.mlflow_run_id), {PARENT_TAG: parent})
