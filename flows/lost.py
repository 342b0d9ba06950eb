"""Runs and sweeps that were lost with their worker are taken up again: what Retry does in Prefect's pages.

    FAILED, its owner dead, its flow run Crashed and of a deployment ─▶ claimed ─▶ flow run scheduled again ─▶ given back

Invariants: of two reapers one schedules it; as often as `retry.infrastructure` (of a sweep or recipe `retry.lost`) allows, by
Prefect's count; what was cancelled meanwhile is KILLED and stays so. What is taken up goes on where it was: a run from its last
checkpoint, a sweep with its trials. Trials are their sweep's: their flow runs come from no deployment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import httpx

from flows.sweep_reaping import end_sweep_in_mlflow, is_lost_sweep
from infra.reaper import owner_alive
from infra.registry import Owner, Registry, RunRow
from infra.registry_records import SweepRow

log = logging.getLogger(__name__)
CANCELLED = ("CANCELLING", "CANCELLED")
LEAST_PAUSE_S = 2.0  # before it is taken up again; longer than it takes to schedule it
_CAUSE = "cancelled in Prefect"


class Lost(Protocol):
    """Rows of one kind that were lost."""

    def rows(self) -> Iterable[Any]: ...
    def status(self, row: Any) -> str: ...
    def backoff_s(self, row: Any, count: int) -> float | None: ...
    def claim(self, row: Any) -> bool: ...
    def give_back(self, row: Any) -> None: ...
    def kill(self, row: Any) -> None: ...


class LostRuns:
    """Runs whose flow was killed, and that nobody has taken up since."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def rows(self) -> list[RunRow]:
        failed = self._registry.list_runs("FAILED", light=True)
        lost = [run for run in failed if run.failure_class == "infrastructure" and run.owner is not None]
        return [run for run in lost if run.owner is not None and not owner_alive(run.owner)]

    def status(self, row: RunRow) -> str:
        return self._registry.get_run(row.id).status

    def backoff_s(self, row: RunRow, count: int) -> float | None:
        from flows.config import ParentRetry, RetryConfig
        from flows.failures import backoff_s

        config = self._registry.get_run(row.id).config  # a light row has none
        retry = config.get("retry") or {}
        policy = ParentRetry.model_validate(retry).own if config.get("type") == "recipe" else RetryConfig.model_validate(retry)
        return backoff_s(policy, "infrastructure", count)

    def claim(self, row: RunRow) -> bool:
        return self._registry.claim_run(row.id, Owner.current(), owner_alive)

    def give_back(self, row: RunRow) -> None:
        self._registry.update_run(row.id, owner=row.owner)

    def kill(self, row: RunRow) -> None:
        self._registry.update_run(row.id, status="KILLED", failure_class=None, cause=_CAUSE)
        end_run_in_mlflow(self._registry.get_run(row.id), "KILLED")


class LostSweeps:
    """Sweeps whose process was killed, and that nobody has taken up since."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def rows(self) -> list[SweepRow]:
        return [row for row in self._registry.list_sweeps() if is_lost_sweep(row)]

    def status(self, row: SweepRow) -> str:
        return self._registry.get_sweep(row.id).status

    def backoff_s(self, row: SweepRow, count: int) -> float | None:
        from flows.config import ParentRetry
        from flows.failures import backoff_s

        return backoff_s(ParentRetry.model_validate(row.config.get("retry") or {}).own, "infrastructure", count)

    def claim(self, row: SweepRow) -> bool:
        return self._registry.claim_sweep(row.id, Owner.current(), owner_alive)

    def give_back(self, row: SweepRow) -> None:
        self._registry.update_sweep(row.id, owner=row.owner)

    def kill(self, row: SweepRow) -> None:
        end_sweep_in_mlflow(self._registry.update_sweep(row.id, status="KILLED", cause=_CAUSE), "KILLED")


def resume_lost(registry: Registry, client: httpx.Client) -> list[str]:
    """Names of the lost runs and sweeps that a worker will take up again."""
    kinds: tuple[Lost, ...] = (LostRuns(registry), LostSweeps(registry))
    return [row.name for lost in kinds for row in lost.rows() if _resume(lost, row, client)]


def _resume(lost: Lost, row: Any, client: httpx.Client) -> bool:
    flow_run = _flow_run(row, client)
    if flow_run is None:
        return False
    if flow_run["state"]["type"] in CANCELLED:
        lost.kill(row)
        return False
    if _pause_s(lost, row, flow_run) is None or not lost.claim(row):
        return False
    try:  # of two reapers the second finds the flow run scheduled
        flow_run = _flow_run(row, client) if lost.status(row) == "FAILED" else None
        pause_s = _pause_s(lost, row, flow_run) if flow_run is not None else None
        if flow_run is None or pause_s is None:
            return False
        _schedule(flow_run, pause_s, client)
        return True
    finally:
        lost.give_back(row)


def _flow_run(row: RunRow | SweepRow, client: httpx.Client) -> dict[str, Any] | None:
    """None: the server that knew it is another one, or gone."""
    if row.prefect_flow_run_id is None:
        return None
    answer = client.get(f"/flow_runs/{row.prefect_flow_run_id}")
    if answer.status_code in (404, 422):
        return None
    flow_run = answer.raise_for_status().json()
    return flow_run if flow_run.get("state") else None


def _pause_s(lost: Lost, row: Any, flow_run: dict[str, Any]) -> float | None:
    """Seconds until it is taken up again; None: it is not, or is already scheduled, or no worker would take it up."""
    if flow_run["state"]["type"] != "CRASHED" or flow_run["deployment_id"] is None:
        return None
    return lost.backoff_s(row, flow_run["run_count"])


def _schedule(flow_run: dict[str, Any], pause_s: float, client: httpx.Client) -> None:
    when = datetime.now(UTC) + timedelta(seconds=max(pause_s, LEAST_PAUSE_S))
    state = {
        "type": "SCHEDULED",
        "name": "AwaitingRetry",
        "message": f"its process was lost in its run number {flow_run['run_count']}; a worker takes it up again",
        "state_details": {"scheduled_time": when.isoformat()},
    }
    set_state(client, flow_run["id"], state)


def set_state(client: httpx.Client, flow_run_id: str, state: dict[str, Any]) -> None:
    """Of a flow run whose process is gone, whatever Prefect's rules say of such a step."""
    client.post(f"/flow_runs/{flow_run_id}/set_state", json={"state": state, "force": True}).raise_for_status()


def end_run_in_mlflow(run: RunRow, status: Any) -> None:
    if run.output_dir is None or not (Path(run.output_dir) / "tracking").is_dir():
        return  # it never tracked anything
    from infra.tracking import end_run

    try:
        end_run(run.output_dir, status, run.cause, run.failure_class, timeout_s=10.0)
    except Exception as error:
        log.warning("MLflow run of %s could not be ended: %s", run.name, error)
