"""Recipes by name: a new one, a resumed one, or a refusal. A recipe is a run in the registry, its stages' runs its children."""

from __future__ import annotations

from typing import Any

from flows.config import RunConfig
from flows.config_file import ConfigErrors, leaves
from flows.preflight import check_dataset, check_gpus, check_model, load_reward, preflight, teacher_check
from flows.preflight_servers import check_student, check_teachers
from flows.recipe_config import MERGED, SFT, RecipeConfig
from flows.recipe_data import JOINED, joined_from
from flows.recipe_plan import LATER, Plan
from flows.runs import RunRefused, begun, claimed, differing_fields, has_checkpoint, plain_name
from infra.home import home
from infra.reaper import owner_alive
from infra.registry import Registry, RunRow
from trainers.references import resolve

FLOW = "specialise-and-merge"


def named(registry: Registry, config: RecipeConfig, flow_run_id: str | None, fallback: str) -> RecipeConfig:
    """`config` with a name: its own, else that of the recipe `flow_run_id` belongs to (a retry), else made from `fallback`."""
    if config.name is not None:
        return config
    rows = registry.list_runs(flow=FLOW, light=True) if flow_run_id else []
    known = next((row for row in rows if row.prefect_flow_run_id == flow_run_id), None)
    return config.model_copy(update={"name": known.name if known else plain_name(fallback)[:80]})


def check_startable(registry: Registry, plan: Plan) -> RunRow | None:
    """The run that the recipe would go on with, None for a new one.

    Raises:
        RunRefused: it is running or finished, or its config differs; or a stage's name is another run's.
    """
    name = str(plan.config.name)
    row = registry.find_run(name)
    if row is None or row.flow != FLOW:
        stages = [name, *(str(stage.name) for stage in plan.stages())]
        if taken := [stage for stage in stages if registry.find_run(stage) is not None]:
            raise RunRefused(f"a run is named {taken[0]!r} already: choose another name for the recipe")
        return None
    if row.owner is not None and owner_alive(row.owner) and row.status == "RUNNING":
        raise RunRefused(f"recipe {name!r} is running (process {row.owner.pid} on {row.owner.host}): choose another name")
    if row.status == "FINISHED":
        raise RunRefused(f"recipe {name!r} is finished: choose another name")
    _check_begun(registry, plan, row)
    return row


def _check_begun(registry: Registry, plan: Plan, row: RunRow) -> None:
    """A stage that has trained is not what another config would have made of it; what comes after it may still change."""
    lines, joined = [], row.stages.get(JOINED)
    datasets = {name: domain.dataset for name, domain in plan.config.domains.items()}
    for config in plan.stages():
        run = registry.find_run(str(config.name))
        if run is None or (run.status != "FINISHED" and not has_checkpoint(registry, run)):
            continue
        later = [field for field, value in leaves(config.model_dump(mode="json")) if value == LATER]
        differing = [
            field
            for field in differing_fields(run, config)
            if field.split(".")[0] != "tags" and not any(f"{known}.".startswith(f"{field}.") for known in later)
        ]
        if config.model == LATER and SFT not in row.stages:
            differing.append("model")  # it began from another one: the supervised run was added since
        if run.name == plan.run_name(MERGED):
            differing += [f"servers.teachers.{name}.model" for name in plan.trained if name not in row.stages]  # likewise
            if joined is not None and joined["of"] != joined_from(datasets):
                differing.append("dataset (the domains' are others)")
        if differing:
            lines.append(f"stage {run.name!r} has trained with another config; these fields differ: {', '.join(differing)}")
    if lines:
        raise RunRefused("\n".join([*lines, "give the same values to resume the recipe, or choose another name"]))


def open_recipe(registry: Registry, plan: Plan, flow_run_id: str | None) -> tuple[RunRow, bool]:
    """The recipe's row, RUNNING and owned by this process, and whether it is resumed.

    Raises:
        RunRefused: see `check_startable`; or another process was faster.
    """
    known, values, name = check_startable(registry, plan), stored(plan.config), str(plan.config.name)
    folder = home() / "recipes" / name
    row = claimed(registry, known, "recipe", name, FLOW, config=values, output_dir=str(folder), tags=plan.config.tags)
    return begun(registry, row, values, flow_run_id), known is not None


def open_stage(registry: Registry, recipe: RunRow, config: RunConfig, flow: str) -> RunRow:
    """The row of a stage's run, the recipe its parent; the flow that the stage is takes it up as its own."""
    name = str(config.name)
    known = registry.find_run(name)
    if known is not None:
        if known.parent_run_id != recipe.id:
            raise RunRefused(f"a run is named {name!r} already, and is no stage of {recipe.name!r}")
        return known
    folder = config.storage.folder() / name
    return registry.create_run(
        name, flow, config.model_dump(mode="json"), output_dir=str(folder), tags=config.tags, parent_run_id=recipe.id
    )


def preflight_stages(plan: Plan) -> None:
    """What can be seen to be wrong with models, data and rewards on this machine.

    Raises:
        ConfigErrors: with one line per problem.
    """
    config, lines = plan.config, []
    check_teacher = teacher_check(config.model)
    if config.sft is not None:
        lines += _problems(plan.sft(), "sft")
    elif not plan.trained:  # no stage before the merging begins from it
        lines += check_model(resolve(config.model))
    for name, domain in config.domains.items():
        if domain.specialist is None:
            lines += _problems(plan.specialist(name, config.model), f"domains.{name}")
        else:
            lines += [f"domains.{name}.{line}" for line in check_teacher(resolve(domain.specialist), "specialist")]
            lines += [f"domains.{name}.{line}" for line in check_dataset("dataset", domain.dataset, {})]
        if domain.eval is not None:
            spec = domain.eval.reward_func or domain.reward_funcs[0]
            try:
                scorer = {"reward_func": load_reward(spec)}
            except Exception as error:  # importing runs the user's module: anything may come out of it
                lines.append(f"domains.{name}.eval.reward_func: {error}")
                continue
            lines += [f"domains.{name}.{line}" for line in check_dataset("eval.dataset", domain.eval.dataset, scorer)]
    lines += _problems_of_merge(plan)
    if lines:
        raise ConfigErrors(list(dict.fromkeys(lines)))


def _problems(config: RunConfig, where: str) -> list[str]:
    try:
        preflight(config)
    except ConfigErrors as error:
        return [f"{where}: {line}" for line in error.lines]
    return []


def _problems_of_merge(plan: Plan) -> list[str]:
    """With its servers and GPUs: `model` stands for what the stages before it make of it, which is as long and as large."""
    base = plan.config.model
    models = {name: domain.specialist or base for name, domain in plan.config.domains.items()}
    merge = plan.merge(base, models, LATER)
    checked = (check_student(merge), check_teachers(merge, lambda model, field: iter(())), check_gpus(merge))
    return [f"merge: {line}" for lines in checked for line in lines]


def stored(config: RecipeConfig) -> dict[str, Any]:
    """The config as the registry keeps it: every value, references unresolved; its `type` tells it from a run's."""
    return {**config.model_dump(mode="json"), "type": "recipe"}


def config_of_recipe(row: RunRow) -> RecipeConfig:
    """The config a recipe was begun with."""
    return RecipeConfig.model_validate({name: value for name, value in row.config.items() if name != "type"})
