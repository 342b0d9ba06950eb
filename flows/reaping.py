"""A reaper's pass over everything a dead owner leaves: processes and leases, the run's row, its MLflow run, its Prefect state.

A flow run that was killed with its CLI stays Running in Prefect for ever, and its MLflow run too: nobody is left to say
otherwise. Each part is tried by itself, for MLflow or Prefect may be away; the next pass finds what is still to do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import httpx

from infra.reaper import owner_alive, reap
from infra.registry import Registry, RunRow

log = logging.getLogger(__name__)
_UNFINISHED = ["RUNNING", "CANCELLING"]
SETTLING_S = 60.0  # a flow's last state reaches Prefect well within this after its run has ended


def reap_all(registry: Registry | None = None) -> str:
    """One pass; a line that says what was done."""
    registry = registry or Registry()
    report = reap(registry)
    for name in report.runs:
        _end_mlflow(registry.get_run(name))
    crashed = _crash_flow_runs(registry)
    parts = [str(report)]
    if crashed:
        parts.append(f"{len(crashed)} Prefect flow run(s) marked Crashed")
    return "; ".join(parts)


def prefect_url() -> str | None:
    """The API that is known to be there: named by the environment, or of `loopwright up`."""
    from flows.services import running

    up = running()
    return os.environ.get("PREFECT_API_URL") or (up.prefect_url if up else None)


def _end_mlflow(run: RunRow) -> None:
    if run.output_dir is None or not (Path(run.output_dir) / "tracking").is_dir():
        return  # it never tracked anything
    from infra.tracking import end_run

    try:
        end_run(run.output_dir, "FAILED", run.cause, run.failure_class, timeout_s=10.0)
    except Exception as error:
        log.warning("MLflow run of %s could not be ended: %s", run.name, error)


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def _nobody_will_end(run: RunRow) -> bool:
    """Whether the run is over and its flow can no longer tell Prefect so."""
    if run.status in ("RUNNING", "PENDING"):
        return False
    if run.owner is not None:
        return not owner_alive(run.owner)
    # Given up by a flow that may be about to report its last state.
    return time.time() - run.updated_at > SETTLING_S


def _crash_flow_runs(registry: Registry) -> Sequence[str]:
    """Set Prefect flow runs of runs that have ended, or whose process is gone, to Crashed; their ids."""
    url = prefect_url()
    if url is None:
        return []
    done = {run.prefect_flow_run_id: run for run in registry.list_runs() if run.prefect_flow_run_id and _nobody_will_end(run)}
    crashed = []
    try:
        with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
            query = {"flow_runs": {"state": {"type": {"any_": _UNFINISHED}}}, "limit": 200}
            answer = client.post("/flow_runs/filter", json=query)
            answer.raise_for_status()
            for flow_run in answer.json():
                run = done.get(flow_run["id"])
                # Running since the run ended: a retry that has not taken the row up yet.
                if run is None or _seconds(flow_run["state"]["timestamp"]) > run.updated_at:
                    continue
                state = {"type": "CRASHED", "name": "Crashed", "message": run.cause or f"the run is {run.status}"}
                client.post(f"/flow_runs/{run.prefect_flow_run_id}/set_state", json={"state": state, "force": True})
                crashed.append(flow_run["id"])
    except httpx.HTTPError as error:
        log.warning("Prefect at %s did not answer the reaper: %s", url, error)
    return crashed
