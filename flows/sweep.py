"""`sweep`: trials over a space of configs, each a run of its own; what was found, on the flow run's page and in MLflow.

check every trial ─▶ open sweep ─▶ loop over trials ─▶ report ─▶ release
                                     └── failure, kill, cancellation ──▶ trials stopped (they can be resumed)
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows import artifacts
from flows.experiment import mlflow_page
from flows.failures import describe, stopped_by
from flows.parent_tracking import tie_children, tracking_uri
from flows.reaping import begin_flow
from flows.run_processes import RunProcesses
from flows.sweep_config import SweepConfig
from flows.sweep_loop import SweepFailed, SweepLoop
from flows.sweep_outcome import latest
from flows.sweep_reaping import sweep_folder
from flows.sweep_report import markdown, summary, write
from flows.sweep_runs import named, open_sweep, preflight_trials
from flows.sweep_space import Plan, checked
from flows.sweep_study import Study, open_storage
from flows.sweep_tracking import SweepTracking, mark_pruned
from infra.leases import LeaseManager
from infra.registry import Registry
from infra.registry_records import SweepRow
from trainers.errors import ConfigError

POLL_S = 0.5


@flow(name="sweep", log_prints=True, persist_result=False)
def sweep(config: SweepConfig) -> Any:
    """Try a space of configs: grid, random or TPE sampling, trials in parallel, those that do worse stopped early.

    Args:
        config: what varies, how, and what trials are judged by; see docs/sweeps.md.
    """
    registry = begin_flow(config)
    flow_run_id = str(flow_run.id)
    try:
        config = named(registry, config, flow_run_id, str(flow_run.name), flow_run.scheduled_start_time)
        plan = checked(config)
        preflight_trials(plan)
        row, resumed = open_sweep(registry, plan.config, flow_run_id)
    except ConfigError as error:
        return Failed(message=str(error), data=error)
    print(f"sweep {row.name} {'goes on' if resumed else 'starts'}: {plan.config.trial_count} trials")
    return _Work(registry, row, plan).run()


class _Work:
    """One flow run's work on a sweep. A plain class, as `flows.experiment.Experiment` is."""

    def __init__(self, registry: Registry, row: SweepRow, plan: Plan) -> None:
        self.registry, self.row, self.plan, self.config = registry, row, plan, plan.config
        self.trial = plan.trial_config(0, self.config.first_values)  # for what all trials share
        self.folder = sweep_folder(row.name)
        limit = self.config.limits.wall_clock_s
        self.deadline = None if limit is None else time.monotonic() + limit
        self.leases = LeaseManager(registry)
        self.processes = RunProcesses(registry, self.leases, self.folder)
        self.open = ExitStack()
        self.study: Study | None = None
        self.tracking: SweepTracking | None = None

    def run(self) -> dict[str, Any] | State:
        """The sweep's result, or a Failed state whose message begins with the cause."""
        try:
            return self._run()
        finally:
            self.processes.stop_all()
            self.open.close()
            self.leases.close()
            artifacts.quietly(lambda: self.registry.update_sweep(self.row.id, owner=None), "the registry")

    def _run(self) -> dict[str, Any] | State:
        try:
            self.tracking = SweepTracking(self.registry, self.row, self.trial, self.folder, self.config)
            parent = self.tracking.parent()
            self._link(parent)
            self.study = Study(self.config, self.open.enter_context(open_storage(self.registry.url)), self.trial.max_steps)
            self._show()
            self._loop(parent, self.study).run()
            found = self._end("FINISHED", None)
            best = found["best"]
            return {"sweep": self.row.name, "best_run": best["run"], "best_value": best["value"], **best["params"]}
        except Exception as error:
            cause = describe(error) if not isinstance(error, SweepFailed) else str(error)
            self.processes.stop_all()
            self._end("FAILED", cause)
            return Failed(message=cause, data=error)
        except BaseException as error:
            self.processes.stop_all()
            self._end("KILLED", stopped_by(error))
            raise

    def _loop(self, parent: str | None, study: Study) -> SweepLoop:
        uri = tracking_uri(self.trial.tracking)
        return SweepLoop(
            self.registry,
            self.row,
            self.plan,
            study,
            self.processes,
            mark_pruned=lambda run, cause: mark_pruned(self.registry, run, cause, uri),
            on_change=self._show,
            pause=self._pause,
            parent_run=parent,
        )

    def _pause(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            limit = self.config.limits.wall_clock_s
            raise SweepFailed(f"limits.wall_clock_s={limit:g} is used up; resume to go on")
        time.sleep(POLL_S)

    def _found(self, importance: dict[str, float] | None = None) -> dict[str, Any]:
        return summary(self.config, self.registry.list_trials(self.row.id), importance)

    def _show(self) -> None:
        """On the flow run's page and in MLflow, after every trial."""
        found = self._found()
        artifacts.markdown("trials", markdown(found), f"Trials of {self.row.name}")
        if self.tracking is not None:
            self.tracking.show(found)
        self.registry.update_sweep(self.row.id, result={"best": found["best"], "counts": found["counts"]})

    def _link(self, parent: str | None) -> None:
        if parent is not None:
            uri = tracking_uri(self.trial.tracking)
            artifacts.mlflow_link(mlflow_page(uri, parent), uri, parent)

    def _end(self, status: Any, cause: str | None) -> dict[str, Any]:
        """The end, in the registry, on the page and in MLflow; what was found."""
        importance = artifacts.quietly(self.study.importance, "Optuna") if self.study and status == "FINISHED" else {}
        found = self._found(importance or {})
        report = artifacts.quietly(lambda: write(self.folder / "report", found), "the report's folder")
        artifacts.markdown("result", markdown(found), f"Result of {self.row.name}")
        if self.tracking is not None:
            self.tracking.show(found)
            self.tracking.end(status, cause, report)
        artifacts.quietly(self._tie_children, "MLflow")
        result = {name: found[name] for name in ("best", "counts", "importance")}
        self.row = self.registry.update_sweep(self.row.id, status=status, cause=cause, result=result)
        return found

    def _tie_children(self) -> None:
        parent = self.registry.get_sweep(self.row.id).mlflow_run_id
        ids = [row.run_id for row in latest(self.registry.list_trials(self.row.id)) if row.run_id]
        if parent is not None:
            children = [self.registry.get_run(run_id) for run_id in ids]
            tie_children(parent, children, self.trial.tracking)
