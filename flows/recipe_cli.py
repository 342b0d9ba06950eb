"""`loopwright specialise-and-merge`. Imports what the command needs only when it runs, as `flows.cli` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flows.recipe_config import RecipeConfig


@click.command("specialise-and-merge")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...")
def specialise_and_merge(file: Path, overrides: tuple[str, ...]) -> None:
    """From a base model to a merged student: SFT, one GRPO specialist per domain, then MOPD, as FILE (YAML or JSON) says.

    FIELD=VALUE sets a field, dotted for nested ones: `grpo.max_steps=20 domains.addition.overrides.learning_rate=1e-4`. The
    same name again goes on where it was stopped, as `loopwright resume NAME` does.
    """
    from flows.recipe_plan import load_recipe

    launch(load_recipe(file, list(overrides)))


def launch(config: RecipeConfig) -> None:
    """Run the recipe's flow to its end.

    Raises:
        LoopwrightError: the recipe was refused or failed.
    """
    from flows.launch import run_flow
    from flows.recipe_plan import Plan
    from flows.recipe_runs import check_startable, named, preflight_stages
    from flows.runs import new_name
    from infra.registry import Registry

    registry = Registry()
    plan = Plan(named(registry, config, None, new_name("recipe")))
    check_startable(registry, plan)
    preflight_stages(plan)  # again in the flow; here it saves the user the wait for Prefect

    def flow() -> object:
        from flows.recipe import specialise_and_merge

        return specialise_and_merge

    run_flow("recipe", flow, plan.config)
