"""A trial's attempts in the registry, and what became of it, read from the row of its run."""

from __future__ import annotations

import math

from flows.sweep_config import ACCURACY, WATCHED_ACCURACY
from flows.sweep_space import Params, Plan
from infra.registry import Registry, RunRow
from infra.registry_records import SweepRow, TrialRow

Points = list[tuple[int, float]]


def points_of(run: RunRow) -> Points:
    """(step, value) of the watched metric, by step; what is no number is left out."""
    pairs = run.progress.get("watched", {}).get("points", [])
    return [(int(step), float(value)) for step, value in pairs if value is not None and math.isfinite(value)]


def latest(rows: list[TrialRow]) -> list[TrialRow]:
    """The newest attempt of every trial, by number."""
    return list({row.number: row for row in sorted(rows, key=lambda row: (row.number, row.attempt))}.values())


def record_attempt(
    registry: Registry, sweep: SweepRow, number: int, attempt: int, params: Params, run_id: str | None = None
) -> TrialRow:
    """The row of a trial's attempt, RUNNING: to be started, or started already."""
    columns = {"attempt": attempt, "params": params, "status": "RUNNING", "run_id": run_id}
    return registry.record_trial(sweep.id, number, f"{sweep.name}:{number}:{attempt}", **columns)


def value_of(run: RunRow, metric: str) -> float | None:
    """What a finished run is judged by; None: it was not measured, or is no number."""
    if metric in (ACCURACY, WATCHED_ACCURACY):
        value = run.stages.get("evaluate", {}).get("accuracy")
    else:
        value = run.progress.get("watched", {}).get("value")
    return float(value) if value is not None and math.isfinite(value) else None


def may_go_on(run: RunRow | None) -> bool:
    """Whether a trial whose process has ended was lost, and not ended by its own fault or a user."""
    if run is None:
        return True  # it died before it had a row: its config was checked before
    return run.status in ("PENDING", "RUNNING") or (run.status == "FAILED" and run.failure_class == "infrastructure")


def failure_cause(run: RunRow | None, how: str, metric: str) -> str:
    if run is None:
        return f"it did not start: {how}"
    if run.status == "FINISHED":
        return f"its run is finished, but {metric} was not measured, or is no number"
    if run.status in ("PENDING", "RUNNING"):
        return f"its process ended: {how}"
    return (run.cause or run.status).splitlines()[0]


def pruned_cause(plan: Plan, step: int, value: float | None) -> str:
    shown = "" if value is None else f", {plan.config.watched} {value:.6g}"
    return f"pruned at step {step}{shown}: worse than other trials were there ({plan.config.pruning.type})"
