"""A reaper's pass over everything a dead owner leaves: processes and leases, the run's row, its MLflow run, its Prefect state.

    registry: owner gone ─▶ processes, leases, row ─▶ MLflow ─▶ Prefect: Crashed or Cancelled ─▶ lost runs scheduled again

A flow run that was killed with its worker or CLI stays Running in Prefect for ever, and its MLflow run too: nobody is left to
say otherwise. Each part is tried by itself, for MLflow or Prefect may be away; the next pass finds what is still to do.

Invariant: what a living process owns is not touched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx
from pydantic import BaseModel

from flows.connections import prefect_login, running
from flows.lost import CANCELLED, end_run_in_mlflow, resume_lost, set_state
from flows.sweep_reaping import reap_sweeps
from infra.process import carrying
from infra.reaper import owner_alive, reap
from infra.redaction import protect_references, redact_logs
from infra.registry import Owner, Registry, RunRow
from infra.registry_records import SweepRow

log = logging.getLogger(__name__)
_UNFINISHED = ["RUNNING", "CANCELLING"]
SETTLING_S = 60.0  # a flow's last state reaches Prefect well within this after its run has ended
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"  # of a process that a worker started


def begin_flow(config: BaseModel) -> Registry:
    """What a flow does first: secrets that `config` refers to stay out of its log, and what dead owners left is reaped."""
    protect_references(config.model_dump(mode="json"))
    redact_logs()
    registry = Registry()
    print(reap_all(registry))
    return registry


def reap_all(registry: Registry | None = None) -> str:
    """One pass; a line that says what was done."""
    registry = registry or Registry()
    report = reap(registry)
    for name, status in report.runs.items():
        end_run_in_mlflow(registry.get_run(name), status)
    _end_half_ended(registry)
    parts = [str(report), *(f"sweep {name}: FAILED" for name in reap_sweeps(registry))]
    if (url := prefect_url()) is not None:
        try:
            with httpx.Client(base_url=url, auth=prefect_login(), timeout=10.0, trust_env=False) as client:
                crashed, resumed = _end_flow_runs(registry, client), resume_lost(registry, client)
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
        end_run_in_mlflow(run, run.status)
        if registry.claim_run(run.id, Owner.current(), owner_alive):  # not resumed meanwhile
            registry.update_run(run.id, owner=None)


def prefect_url() -> str | None:
    """The API that is known to be there: named by the environment, or of `loopwright up`."""
    up = running()
    return os.environ.get("PREFECT_API_URL") or (up.prefect_url if up else None)


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
            set_state(client, flow_run["id"], {"type": "CRASHED", "name": "Crashed", "message": message})
            ended.append(flow_run["id"])
        # Running since the run ended: a retry that has not taken the row up yet.
        if run is None or _seconds(flow_run["state"]["timestamp"]) > run.updated_at:
            continue
        kind = "CANCELLED" if flow_run["state"]["type"] in CANCELLED else "CRASHED"
        if run.status == "FINISHED":  # Prefect was away when its flow had that to say
            kind = "COMPLETED"
        message = run.cause or f"the run is {run.status}"
        set_state(client, flow_run["id"], {"type": kind, "name": kind.capitalize(), "message": message})
        ended.append(flow_run["id"])
    return ended


def _is_gone(flow_run: dict[str, Any], client: httpx.Client) -> bool:
    """Whether a worker's flow run has no process. Told only of a Prefect on loopback, whose workers are all on this machine."""
    known = flow_run.get("deployment_id") is not None and client.base_url.host in ("127.0.0.1", "localhost", "::1")
    if not known or time.time() - _seconds(flow_run["state"]["timestamp"]) < SETTLING_S:
        return False
    return os.environ.get(FLOW_RUN_VARIABLE) != flow_run["id"] and not carrying(FLOW_RUN_VARIABLE, flow_run["id"])
