"""The runs of a recipe's stages: started in processes, watched, started again if they were lost.

configs of stages ─▶ open_stage: a row, child of the recipe's ─▶ Runner.start ─▶ ended ─▶ run FINISHED ─▶ stage done
                                                                    └─▶ lost: again, from its last checkpoint
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from flows.config import GeneratingRunConfig, RunConfig
from flows.failures import RunFailed
from flows.recipe_config import RecipeConfig
from flows.recipe_runs import open_stage
from flows.sweep_outcome import may_go_on
from infra.gpus import visible_gpus
from infra.registry import Registry, RunRow
from trainers.errors import FailureClass

POLL_S = 0.5
_FLOWS = {"sft": "sft-long-context", "grpo": "train-grpo", "distillation": "distill-mopd"}


class Runner(Protocol):
    """Runs in processes of their own, by stage: `flows.run_processes.RunProcesses`."""

    def ready(self, config: RunConfig) -> bool:
        """Whether this run could start now: its devices are free, and no older process of it is left."""
        ...

    def start(self, key: str, config: RunConfig) -> None: ...

    def ended(self, key: str) -> str | None:
        """How the process ended; None: it runs."""
        ...

    def stop_all(self) -> None: ...


class StageRuns:
    """Of the recipe whose row is `row`; `on_change` is called when a stage is finished."""

    def __init__(
        self, registry: Registry, row: RunRow, config: RecipeConfig, runner: Runner, on_change: Callable[[], None]
    ) -> None:
        self._registry, self._row, self._config, self._runner, self._on_change = registry, row, config, runner, on_change

    def stop(self) -> None:
        """All of them at once; they can be resumed."""
        self._runner.stop_all()

    def train(self, configs: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
        """The runs of these stages, side by side as far as `parallel` and GPUs allow; each stage's result.

        Raises:
            RunFailed: one has failed; the others were asked to stop, and can be resumed.
        """
        done = self._registry.get_run(self._row.id).stages
        results = {stage: done[stage] for stage in configs if stage in done}
        waiting = {stage: 0.0 for stage in configs if stage not in results}  # not before this time
        running: set[str] = set()
        lost: Counter[str] = Counter()
        most = self._config.parallel or (len(configs) if visible_gpus() else 1)
        while waiting or running:
            for stage in [stage for stage, due in waiting.items() if due <= time.monotonic()]:
                shared = any(_students(configs[stage]) & _students(configs[other]) for other in running)
                if len(running) < most and not shared and self._runner.ready(configs[stage]):
                    del waiting[stage]
                    running.add(stage)
                    self._start(stage, configs[stage])
            for stage in sorted(running):
                how = self._runner.ended(stage)
                if how is None:
                    continue
                running.remove(stage)
                run = self._registry.get_run(str(configs[stage].name))
                if run.status == "FINISHED":
                    results[stage] = self._finished(stage, run)
                elif may_go_on(run) and lost[stage] < self._config.retry.infrastructure:
                    lost[stage] += 1
                    waiting[stage] = time.monotonic() + self._config.retry.backoff_s
                    print(f"stage {stage} goes on: {(run.cause or how).splitlines()[0]}", flush=True)
                else:
                    # What somebody stopped has no class: like the user's own faults it is not tried again.
                    failure = run.failure_class or ("user" if run.status == "KILLED" else "infrastructure")
                    raise RunFailed(cast(FailureClass, failure), f"{run.name}: {run.cause or how}", run.traceback)
            time.sleep(POLL_S)
        return results

    def _start(self, stage: str, config: RunConfig) -> None:
        run = open_stage(self._registry, self._row, config, _FLOWS[config.type])
        print(f"stage {stage}: run {run.name} {'goes on' if run.mlflow_run_id else 'starts'}", flush=True)
        self._runner.start(stage, config)

    def _finished(self, stage: str, run: RunRow) -> dict[str, Any]:
        trained = run.stages["train"]
        result = {"run": run.name, "checkpoint": trained["checkpoint"], "step": trained["step"], **run.stages["register"]}
        self._registry.set_stage(self._row.id, stage, result)
        print(f"stage {stage} is finished: step {trained['step']}, {trained['checkpoint']}", flush=True)
        self._on_change()
        return result


def _students(config: RunConfig) -> set[str]:
    """Servers that are up already and take this run's weights: of two runs at once each would overwrite the other's."""
    return set(config.servers.student.urls) if isinstance(config, GeneratingRunConfig) else set()
