"""One flow run's work on a recipe: its stages in order, what they made, and how it ends in registry and MLflow.

    StageRuns: runs in processes ──┐
    Accuracy: models on domains ───┼─▶ Course ─▶ RecipeWork ─▶ the recipe's row, the flow run's page, RecipeTracking (MLflow)

A plain class, as `flows.experiment.Experiment` is: Prefect walks through what it is given.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from flows import artifacts
from flows.experiment import mlflow_page
from flows.failures import RunFailed, describe, failure_of, stopped_by
from flows.recipe_accuracy import Accuracy
from flows.recipe_course import Course
from flows.recipe_plan import MERGED, SFT, Plan
from flows.recipe_report import markdown, summary
from flows.recipe_stages import StageRuns
from flows.recipe_tracking import RecipeTracking, tracking_uri
from flows.run_processes import RunProcesses
from flows.sweep_tracking import tie_children
from infra.leases import LeaseManager
from infra.patience import plain
from infra.redaction import redact
from infra.registry import Registry, RunRow


class RecipeWork:
    """Holds the recipe's row, which the caller has claimed, until `run` returns."""

    def __init__(self, registry: Registry, row: RunRow, plan: Plan) -> None:
        self.registry, self.row, self.plan, self.config = registry, row, plan, plan.config
        self.leases = LeaseManager(registry)
        folder = Path(str(row.output_dir))
        runner = RunProcesses(registry, self.leases, folder, module="flows.recipe_stage", what="stage")
        self.runs = StageRuns(registry, row, self.config, runner, self._show)
        self.accuracy = Accuracy(registry, row, plan)
        self.progress = artifacts.Progress()
        self.tracking: RecipeTracking | None = None
        self.parent: str | None = None

    def run(self) -> dict[str, Any]:
        """The recipe's result.

        Raises:
            RunFailed: a stage has failed; it says which, and why.
        """
        try:
            return self._run()
        finally:
            self.runs.stop()
            self.leases.close()
            artifacts.quietly(lambda: plain(self.registry).update_run(self.row.id, owner=None), "the registry")

    def _run(self) -> dict[str, Any]:
        try:
            self.tracking = RecipeTracking(self.registry, self.row, self.config)
            self.parent = self.tracking.parent()
            self._link()
            course = Course(self.registry, self.row, self.plan, self.runs, self.accuracy, self._show, self.parent)
            merged = course.run()
            self._end("FINISHED")
            return {"recipe": self.row.name, **merged, **_flat(summary(self.config, self.accuracy.all()))}
        except Exception as error:
            failure = error.failure if isinstance(error, RunFailed) else failure_of(error)
            cause = describe(error)
            trace = error.traceback if isinstance(error, RunFailed) else redact(traceback.format_exc())
            self.runs.stop()
            self._end("FAILED", cause, failure, trace)
            raise RunFailed(failure, cause, trace) from error
        except BaseException as error:
            self.runs.stop()
            self._end("KILLED", stopped_by(error))
            raise

    def _link(self) -> None:
        if self.parent is not None:
            uri = tracking_uri(self.config)
            artifacts.mlflow_link(mlflow_page(uri, self.parent), uri, self.parent)

    def _children(self) -> list[RunRow]:
        return list(reversed(self.registry.list_runs(parent=self.row.id)))

    def _page(self) -> str:
        runs = {run.name: f"{run.status} · {artifacts.describe(run.progress)}" for run in self._children()}
        return markdown(self.config, self.accuracy.all(), runs)

    def _show(self) -> None:
        """On the flow run's page and in the registry, after every stage."""
        stages = len(self.plan.stages())
        names = {SFT, MERGED, *self.plan.trained}
        self.registry.progress(
            self.row.id, {"step": sum(name in names for name in self.registry.get_run(self.row.id).stages), "max_steps": stages}
        )
        self.progress.show(self.registry.get_run(self.row.id).progress)
        artifacts.markdown("accuracy", self._page(), f"Accuracies of {self.row.name}")

    def _end(self, status: Any, cause: str | None = None, failure: Any = None, trace: str | None = None) -> None:
        """The end in registry, on the page and in MLflow."""
        registry = plain(self.registry) if status == "KILLED" else self.registry  # killed: no time to wait for a database
        registry.update_run(self.row.id, status=status, failure_class=failure, cause=cause, traceback=trace)
        page = artifacts.quietly(self._page, "the registry") or ""
        artifacts.markdown("result", page, f"Result of {self.row.name}")
        if self.tracking is not None:
            accuracies = artifacts.quietly(self.accuracy.all, "the registry") or {}
            self.tracking.end(status, cause, failure, accuracies, page)
        artifacts.quietly(self._tie_children, "MLflow")

    def _tie_children(self) -> None:
        parent = self.registry.get_run(self.row.id).mlflow_run_id
        if parent is not None:
            tie_children(parent, self._children(), tracking_uri(self.config), self.config.tracking.experiment)


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """`accuracy merged addition: 0.9` and so on, for the lines that the command prints."""
    figures = {
        f"accuracy {model} {name}": value for model, values in found["accuracy"].items() for name, value in values.items()
    }
    return figures | {f"gain kept {name}": round(share, 4) for name, share in found["kept"].items() if share is not None}
