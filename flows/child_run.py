"""One run of a sweep or recipe in a process of its own: `python -m flows.child_run CONFIG.json`.

It takes the way `loopwright run` and `loopwright resume` take, so that a trial or stage is a run like any other. Exit codes are
those of the command: 0 finished, 1 failed, 2 refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from flows.config import RUN_CONFIGS, RunConfig
from flows.launch import launch
from flows.recipe_plan import RECIPE_TAG
from flows.runs import RunRefused, config_of
from infra.errors import InfraError
from infra.registry import Registry
from trainers.errors import ConfigError, LoopwrightError


def run_trial(config: RunConfig) -> None:
    """Begin the trial's run, or go on with it as it was begun.

    Raises:
        LoopwrightError: the run was refused or failed.
    """
    assert config.sweep is not None, config.name
    run = Registry().find_run(str(config.name))
    if run is not None:
        begun = config_of(run)
        if begun.sweep is None or (begun.sweep.name, begun.sweep.trial) != (config.sweep.name, config.sweep.trial):
            raise RunRefused(f"a run is named {config.name!r} already, and is no trial of sweep {config.sweep.name!r}")
        if run.status == "FINISHED":
            return
        config = begun
    with _tagged(f"sweep:{config.sweep.name}" if config.sweep else ""):
        launch(config)


def run_stage(config: RunConfig) -> None:
    """Begin the stage's run, whose row the recipe has made, or go on with it.

    Raises:
        LoopwrightError: the run was refused or failed.
    """
    registry = Registry()
    run = registry.get_run(str(config.name))
    if run.status == "FINISHED":
        return
    # It began without knowing its parent in MLflow if that was away; its tags are part of what a resume compares.
    config = config.model_copy(update={"tags": run.config["tags"]})
    try:
        with _tagged(f"recipe:{config.tags[RECIPE_TAG]}"):
            launch(config)
    except RunRefused:  # somebody else has it, and its row
        raise
    except ConfigError as error:
        # Refused before its flow could say so: to the recipe it would look lost, and be started again.
        if registry.get_run(run.id).failure_class != error.failure_class:
            registry.update_run(run.id, status="FAILED", failure_class=error.failure_class, cause=str(error))
        raise


def _tagged(tag: str) -> AbstractContextManager[object]:
    """On Prefect's page the runs of a sweep or recipe have a tag. Prefect is imported once it is known which API to use."""
    if "PREFECT_API_URL" not in os.environ:
        return nullcontext()
    from prefect import tags

    return tags(tag)


def main(arguments: Sequence[str]) -> int:
    """The run whose config's file is the only argument; the exit code."""
    if len(arguments) != 1:
        print("usage: python -m flows.child_run CONFIG.json", file=sys.stderr)
        return 2
    fields = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        config = RUN_CONFIGS[fields["type"]].model_validate(fields)
        run_trial(config) if config.sweep is not None else run_stage(config)
    except (LoopwrightError, InfraError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
