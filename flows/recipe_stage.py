"""One stage of a recipe in a process of its own: `python -m flows.recipe_stage CONFIG.json`.

It takes the way `loopwright run` and `loopwright resume` take, so that a stage is a run like any other. Exit codes are those of
the command: 0 finished, 1 failed, 2 refused.
"""

from __future__ import annotations

import sys

from flows.config import RunConfig
from flows.launch import launch
from flows.recipe_plan import RECIPE_TAG
from flows.sweep_trial import main, tagged
from infra.registry import Registry


def run_stage(config: RunConfig) -> None:
    """Begin the stage's run, whose row the recipe has made, or go on with it.

    Raises:
        LoopwrightError: the run was refused or failed.
    """
    run = Registry().get_run(str(config.name))
    if run.status == "FINISHED":
        return
    # It began without knowing its parent in MLflow if that was away; its tags are part of what a resume compares.
    config = config.model_copy(update={"tags": run.config["tags"]})
    with tagged(f"recipe:{config.tags[RECIPE_TAG]}"):
        launch(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], run_stage))
