"""`specialise-and-merge`: from a base model to one student that has what its specialists have.

    base ─▶ SFT ─┬▶ GRPO specialist of domain 1 ─┬▶ MOPD: SFT checkpoint taught by the frozen specialists ─▶ merged student
                 └▶ GRPO specialist of domain n ─┘      on the domains' prompts, each with its teacher's name
    after each stage: accuracy of its model on every domain

Each stage is a run of its own, in a process of its own, a child of the recipe's run in registry and MLflow. Invariants, kept
when this process is killed between any two of these:
- a finished stage is found in the registry and not run again; one that has begun goes on from its run's last checkpoint;
- what a stage begins from is what the registry says the stages before it made;
- a stage's row is there, with the recipe as its parent, before its process starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows import artifacts
from flows.experiment import mlflow_page
from flows.failures import run_failed, stopped_by
from flows.parent_tracking import tie_children, tracking_uri
from flows.reaping import begin_flow
from flows.recipe_accuracy import Accuracy
from flows.recipe_config import MERGED, SFT, RecipeConfig
from flows.recipe_course import Course
from flows.recipe_plan import Plan, located
from flows.recipe_report import markdown, summary
from flows.recipe_runs import named, open_recipe, preflight_stages
from flows.recipe_stages import StageRuns
from flows.recipe_tracking import RecipeTracking
from flows.run_processes import RunProcesses
from infra.leases import LeaseManager
from infra.patience import patient, plain
from infra.registry import Registry, RunRow
from trainers.errors import ConfigError


@flow(name="specialise-and-merge", log_prints=True, persist_result=False)
def specialise_and_merge(config: RecipeConfig) -> Any:
    """From a base model to a merged student: SFT, one GRPO specialist per domain, then MOPD from the specialists.

    Args:
        config: the model, its domains, and the fields of the stages; see docs/recipe.md.
    """
    registry = patient(begin_flow(config))
    flow_run_id = str(flow_run.id)
    try:
        plan = Plan(located(named(registry, config, flow_run_id, str(flow_run.name))))
        preflight_stages(plan)
        row, resumed = open_recipe(registry, plan, flow_run_id)
    except ConfigError as error:
        return Failed(message=str(error), data=error)
    print(f"recipe {row.name} {'goes on' if resumed else 'starts'}: {', '.join(str(stage.name) for stage in plan.stages())}")
    return _Work(registry, row, plan).run()


class _Work:
    """One flow run's work on a recipe, whose row the caller has claimed. A plain class, as `flows.experiment.Experiment` is."""

    def __init__(self, registry: Registry, row: RunRow, plan: Plan) -> None:
        self.registry, self.row, self.plan, self.config = registry, row, plan, plan.config
        self.leases = LeaseManager(registry)
        folder = Path(str(row.output_dir))
        runner = RunProcesses(registry, self.leases, folder, what="stage")
        self.runs = StageRuns(registry, row, self.config, runner, self._show)
        self.accuracy = Accuracy(registry, row, plan)
        self.progress = artifacts.Progress()
        self.tracking: RecipeTracking | None = None
        self.parent: str | None = None

    def run(self) -> dict[str, Any] | State:
        """The recipe's result, or a Failed state whose message begins with the cause: the stage that failed, and why."""
        try:
            return self._run()
        finally:
            self.runs.stop()
            self.leases.close()
            artifacts.quietly(lambda: plain(self.registry).update_run(self.row.id, owner=None), "the registry")

    def _run(self) -> dict[str, Any] | State:
        try:
            self.tracking = RecipeTracking(self.registry, self.row, self.config)
            self.parent = self.tracking.parent()
            self._link()
            course = Course(self.registry, self.row, self.plan, self.runs, self.accuracy, self._show, self.parent)
            merged = course.run()
            self._end("FINISHED")
            return {"recipe": self.row.name, **merged, **_flat(summary(self.config, self.accuracy.all()))}
        except Exception as error:
            end = run_failed(error)
            self.runs.stop()
            self._end("FAILED", str(end), end.failure, end.traceback)
            return Failed(message=str(end), data=end)
        except BaseException as error:
            self.runs.stop()
            self._end("KILLED", stopped_by(error))
            raise

    def _link(self) -> None:
        if self.parent is not None:
            uri = tracking_uri(self.config.tracking)
            artifacts.mlflow_link(mlflow_page(uri, self.parent), uri, self.parent)

    def _children(self) -> list[RunRow]:
        return list(reversed(self.registry.list_runs(parent=self.row.id)))

    def _page(self) -> str:
        runs = {run.name: f"{run.status} · {artifacts.describe(run.progress)}" for run in self._children()}
        return markdown(self.config, self.accuracy.all(), runs)

    def _show(self) -> None:
        """On the flow run's page and in the registry, after every stage."""
        names = {SFT, MERGED, *self.plan.trained}
        done = sum(name in names for name in self.registry.get_run(self.row.id).stages)
        progress = {"step": done, "max_steps": len(self.plan.stages())}
        self.registry.progress(self.row.id, progress)
        self.progress.show(progress)
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
            tie_children(parent, self._children(), self.config.tracking)


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """`accuracy merged addition: 0.9` and so on, for the lines that the command prints."""
    figures = {
        f"accuracy {model} {name}": value for model, values in found["accuracy"].items() for name, value in values.items()
    }
    return figures | {f"gain kept {name}": round(share, 4) for name, share in found["kept"].items() if share is not None}
