"""Sweeps whose process is gone: FAILED in registry and MLflow, as runs are. Their trials are runs, and reaped as such."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from infra.home import home
from infra.reaper import owner_alive
from infra.registry import Owner, Registry
from infra.registry_records import SweepRow

log = logging.getLogger(__name__)
_LOST = "the sweep's process "


def sweep_folder(name: str) -> Path:
    """Logs and configs of the trials' processes, the report, what waits for MLflow."""
    return home() / "sweeps" / name


def reap_sweeps(registry: Registry) -> list[str]:
    """Names of the sweeps that became FAILED."""
    reaped = []
    for row in registry.list_sweeps():
        dead = row.owner
        if row.status != "RUNNING" or dead is None or owner_alive(dead):
            continue
        if not registry.claim_sweep(row.id, Owner.current(), owner_alive):
            continue  # resumed in between
        cause = f"{_LOST}{dead.pid} on {dead.host} is gone: killed, or the machine was restarted"
        # The dead owner stays in the row, as in a run's: it tells a sweep that was lost from one that was given up.
        row = registry.update_sweep(row.id, status="FAILED", cause=cause, owner=dead)
        end_sweep_in_mlflow(row, "FAILED", "infrastructure")
        reaped.append(row.name)
    return reaped


def is_lost_sweep(row: SweepRow) -> bool:
    """Whether its process was killed, and nobody has taken it up since."""
    lost = row.status == "FAILED" and (row.cause or "").startswith(_LOST)
    return lost and row.owner is not None and not owner_alive(row.owner)


def end_sweep_in_mlflow(row: SweepRow, status: Any, failure: str | None = None) -> None:
    folder = sweep_folder(row.name)
    if not (folder / "tracking").is_dir():
        return  # it never tracked anything
    from infra.tracking import end_run

    try:
        end_run(folder, status, row.cause, failure, timeout_s=10.0)
    except Exception as error:
        log.warning("MLflow run of sweep %s could not be ended: %s", row.name, error)
