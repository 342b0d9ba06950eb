"""A reaper's pass over everything a dead owner leaves: processes and leases, the run's row, its MLflow run, its Prefect state.

    registry: owner gone ─▶ processes, leases, row ─▶ MLflow ─▶ Prefect: Crashed or Cancelled ─▶ lost runs scheduled again

A flow run that was killed with its worker or CLI stays Running in Prefect for ever, and its MLflow run too: nobody is left to
say otherwise. Each part is tried by itself, for MLflow or Prefect may be away; the next pass finds what is still to do.

Invariants: what a living process owns is not touched; a lost run is scheduled again by one reaper only, as often as
`retry.infrastructure` allows, and only if a worker will take it up (its flow run came from a deployment).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from flows.connections import prefect_login, running
from flows.sweep_reaping import reap_sweeps
from infra.process import carrying
from infra.reaper import owner_alive, reap
from infra.registry import Owner, Registry, RunRow
from infra.registry_records import SweepRow

log = logging.getLogger(__name__)
_UNFINISHED = ["RUNNING", "CANCELLING"]
_CANCELLED = ("CANCELLING", "CANCELLED")
SETTLING_S = 60.0  # a flow's last state reaches Prefect well within this after its run has ended
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"  # of a process that a worker started
LEAST_PAUSE_S = 2.0  # before a lost run is taken up again; longer than it takes to schedule it


def reap_all(registry: Registry | None = None) -> str:
    """One pass; a line that says what was done."""
    registry = registry or Registry()
    report = reap(registry)
    for name, status in report.runs.items():
        _end_mlflow(registry.get_run(name), status)
    _end_half_ended(registry)
    parts = [str(report), *(f"sweep {name}: FAILED" for name in reap_sweeps(registry))]
    if (url := prefect_url()) is not None:
        try:
            with httpx.Client(base_url=url, auth=prefect_login(), timeout=10.0, trust_env=False) as client:
                crashed, resumed = _end_flow_runs(registry, client), _resume_lost(registry, client)
        except httpx.HTTPError as error:
            log.warning("Prefect at %s did not answer the reaper: %s", url, error)
        else:
            parts += [f"{len(crashed)} Prefect flow run(s) marked Crashed"] if crashed else []
            parts += [f"scheduled again: {', '.join(resumed)}"] if resumed else []
    return "; ".join(parts)


def _end_half_ended(registry: Registry) -> None:
    """Runs whose flow said how they ended, and was killed before it had told MLflow: Prefect kills a flow run 30 s after it
    began to cancel it. Without an owner they are done with."""
    for run in registry.list_runs(light=True):
        told = run.status == "KILLED" or (run.status == "FAILED" and run.failure_class != "infrastructure")
        if not told or run.owner is None or owner_alive(run.owner):
            continue
        _end_mlflow(run, run.status)
        if registry.claim_run(run.id, Owner.current(), owner_alive):  # not resumed meanwhile
            registry.update_run(run.id, owner=None)


def prefect_url() -> str | None:
    """The API that is known to be there: named by the environment, or of `loopwright up`."""
    up = running()
    return os.environ.get("PREFECT_API_URL") or (up.prefect_url if up else None)


def _end_mlflow(run: RunRow, status: Any) -> None:
    if run.output_dir is None or not (Path(run.output_dir) / "tracking").is_dir():
        return  # it never tracked anything
    from infra.tracking import end_run

    try:
        end_run(run.output_dir, status, run.cause, run.failure_class, timeout_s=10.0)
    except Exception as error:
        log.warning("MLflow run of %s could not be ended: %s", run.name, error)


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def _nobody_will_end(run: RunRow | SweepRow) -> bool:
    """Whether the run or sweep is over and its flow can no longer tell Prefect so."""
    if run.status in ("RUNNING", "PENDING"):
        return False
    if run.owner is not None:
        return not owner_alive(run.owner)
    # Given up by a flow that may be about to report its last state.
    return time.time() - run.updated_at > SETTLING_S


def _lost(run: RunRow) -> bool:
    """Its flow was killed, and nobody has taken it up since."""
    return run.failure_class == "infrastructure" and run.owner is not None and not owner_alive(run.owner)


def _end_flow_runs(registry: Registry, client: httpx.Client) -> Sequence[str]:
    """Set Prefect flow runs of runs that have ended, or whose process is gone, to Crashed (Cancelled); their ids."""
    known = (*registry.list_runs(light=True), *registry.list_sweeps())
    rows = {row.prefect_flow_run_id: row for row in known if row.prefect_flow_run_id}
    done = {flow_run: row for flow_run, row in rows.items() if _nobody_will_end(row)}
    ended = []
    query = {"flow_runs": {"state": {"type": {"any_": _UNFINISHED}}}, "limit": 200}
    for flow_run in client.post("/flow_runs/filter", json=query).raise_for_status().json():
        run = done.get(flow_run["id"])
        if flow_run["id"] not in rows and _is_gone(flow_run, client):
            message = "its process is gone, before it took up a run"
            _set_state(client, flow_run["id"], {"type": "CRASHED", "name": "Crashed", "message": message})
            ended.append(flow_run["id"])
        # Running since the run ended: a retry that has not taken the row up yet.
        if run is None or _seconds(flow_run["state"]["timestamp"]) > run.updated_at:
            continue
        kind = "CANCELLED" if flow_run["state"]["type"] in _CANCELLED else "CRASHED"
        if run.status == "FINISHED":  # Prefect was away when its flow had that to say
            kind = "COMPLETED"
        message = run.cause or f"the run is {run.status}"
        _set_state(client, flow_run["id"], {"type": kind, "name": kind.capitalize(), "message": message})
        ended.append(flow_run["id"])
    return ended


def _is_gone(flow_run: dict[str, Any], client: httpx.Client) -> bool:
    """Whether a worker's flow run has no process. Told only of a Prefect on loopback, whose workers are all on this machine."""
    known = flow_run.get("deployment_id") is not None and client.base_url.host in ("127.0.0.1", "localhost", "::1")
    if not known or time.time() - _seconds(flow_run["state"]["timestamp"]) < SETTLING_S:
        return False
    return os.environ.get(FLOW_RUN_VARIABLE) != flow_run["id"] and not carrying(FLOW_RUN_VARIABLE, flow_run["id"])


def _set_state(client: httpx.Client, flow_run_id: str, state: dict[str, Any]) -> None:
    client.post(f"/flow_runs/{flow_run_id}/set_state", json={"state": state, "force": True}).raise_for_status()


def _resume_lost(registry: Registry, client: httpx.Client) -> list[str]:
    """Names of the lost runs that a worker will take up again: what Retry does in Prefect's pages."""
    resumed = []
    for run in registry.list_runs("FAILED", light=True):
        if not _lost(run) or (flow_run := _flow_run(run, client)) is None:
            continue
        if flow_run["state"]["type"] in _CANCELLED:
            registry.update_run(run.id, status="KILLED", failure_class=None, cause="cancelled in Prefect")
            _end_mlflow(registry.get_run(run.id), "KILLED")
        elif _pause_s(registry, run, flow_run) is not None and registry.claim_run(run.id, Owner.current(), owner_alive):
            try:  # of two reapers the second finds the flow run scheduled
                run_now, flow_run = registry.get_run(run.id), _flow_run(run, client)
                pause = _pause_s(registry, run, flow_run) if flow_run and run_now.status == "FAILED" else None
                if flow_run is not None and pause is not None:
                    _schedule(flow_run, pause, client)
                    resumed.append(run.name)
            finally:
                registry.update_run(run.id, owner=run.owner)
    return resumed


def _flow_run(run: RunRow, client: httpx.Client) -> dict[str, Any] | None:
    """None: the server that knew it is another one, or gone."""
    if run.prefect_flow_run_id is None:
        return None
    answer = client.get(f"/flow_runs/{run.prefect_flow_run_id}")
    if answer.status_code in (404, 422):
        return None
    flow_run = answer.raise_for_status().json()
    return flow_run if flow_run.get("state") else None


def _pause_s(registry: Registry, run: RunRow, flow_run: dict[str, Any]) -> float | None:
    """Seconds until it is taken up again; None: it is not, or is already scheduled."""
    if flow_run["state"]["type"] != "CRASHED" or flow_run["deployment_id"] is None:
        return None
    from flows.config import RetryConfig
    from flows.failures import backoff_s

    retry = registry.get_run(run.id).config.get("retry")  # a light row has none
    return backoff_s(RetryConfig.model_validate(retry or {}), "infrastructure", flow_run["run_count"])


def _schedule(flow_run: dict[str, Any], pause_s: float, client: httpx.Client) -> None:
    when = datetime.now(UTC) + timedelta(seconds=max(pause_s, LEAST_PAUSE_S))
    state = {
        "type": "SCHEDULED",
        "name": "AwaitingRetry",
        "message": f"its process was lost in its run number {flow_run['run_count']}; a worker takes it up again",
        "state_details": {"scheduled_time": when.isoformat()},
    }
    _set_state(client, flow_run["id"], state)
