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

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.failures import RunFailed
from flows.reaping import reap_all
from flows.recipe_config import RecipeConfig
from flows.recipe_plan import Plan, located
from flows.recipe_runs import named, open_recipe, preflight_stages
from flows.recipe_work import RecipeWork
from infra.patience import patient, plain
from infra.redaction import protect_references, redact_logs
from infra.registry import Registry
from trainers.errors import ConfigError


@flow(name="specialise-and-merge", log_prints=True, persist_result=False)
def specialise_and_merge(config: RecipeConfig) -> Any:
    """From a base model to a merged student: SFT, one GRPO specialist per domain, then MOPD from the specialists.

    Args:
        config: the model, its domains, and the fields of the stages; see docs/recipe.md.
    """
    protect_references(config.model_dump(mode="json"))
    redact_logs()
    registry = patient(Registry())
    print(reap_all(plain(registry)))
    flow_run_id = str(flow_run.id)
    try:
        plan = Plan(located(named(registry, config, flow_run_id, str(flow_run.name))))
        preflight_stages(plan)
        row, resumed = open_recipe(registry, plan, flow_run_id)
    except ConfigError as error:
        return Failed(message=str(error), data=error)
    print(f"recipe {row.name} {'goes on' if resumed else 'starts'}: {', '.join(str(stage.name) for stage in plan.stages())}")
    return _ended(RecipeWork(registry, row, plan))


def _ended(work: RecipeWork) -> dict[str, Any] | State:
    """The result, or a Failed state whose message begins with the cause."""
    try:
        return work.run()
    except RunFailed as error:
        return Failed(message=str(error), data=error)
