"""A sweep without processes: trials that advance by a step at every pause, and a sweep that can be killed at any write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optuna.storages import InMemoryStorage
from sqlalchemy.exc import OperationalError

from flows.config import RunConfig
from flows.sweep_file import sweep_config
from flows.sweep_loop import SweepLoop
from flows.sweep_space import Plan
from flows.sweep_study import Study
from infra.registry import Registry, RunRow

STEPS = 4


class Killed(BaseException):
    """SIGKILL of the sweep."""


class Faults:
    """Raises at the `at`-th write, before or after it is done; counts all writes."""

    def __init__(self, at: int | None = None, after: bool = False, error: Callable[[], BaseException] = Killed) -> None:
        self.at, self.after, self.error, self.count = at, after, error, 0

    def around(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.at == self.count and not self.after:
                raise self.error()
            result = write(*arguments, **options)
            if self.at == self.count and self.after:
                raise self.error()
            return result

        return call


def outage() -> BaseException:
    return OperationalError("UPDATE", None, Exception("the database is away"))


class FaultyRegistry:
    """The sweep's own writes may fail; what trials write does not go through it."""

    def __init__(self, registry: Registry, faults: Faults) -> None:
        self._registry, self._faults = registry, faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._registry, name)
        return self._faults.around(method) if name in ("record_trial", "update_trial", "update_run") else method


class FaultyStorage(InMemoryStorage):
    """Optuna's storage, which outlives the sweep that writes to it."""

    faults = Faults()

    def create_new_trial(self, *arguments: Any, **options: Any) -> int:
        return self.faults.around(super().create_new_trial)(*arguments, **options)

    def set_trial_param(self, *arguments: Any, **options: Any) -> None:
        return self.faults.around(super().set_trial_param)(*arguments, **options)

    def set_trial_user_attr(self, *arguments: Any, **options: Any) -> None:
        return self.faults.around(super().set_trial_user_attr)(*arguments, **options)

    def set_trial_state_values(self, *arguments: Any, **options: Any) -> bool:
        return self.faults.around(super().set_trial_state_values)(*arguments, **options)

    def set_trial_intermediate_value(self, *arguments: Any, **options: Any) -> None:
        return self.faults.around(super().set_trial_intermediate_value)(*arguments, **options)


class FakeRunner:
    """Trials as rows of the registry: `value(config, step)` is what one logs, `fails(config, start)` how a start of it ends."""

    def __init__(
        self,
        registry: Registry,
        value: Callable[[RunConfig, int], float],
        fails: Callable[[RunConfig, int], tuple[str, str] | None] = lambda config, start: None,
    ) -> None:
        self.registry, self.value, self.fails = registry, value, fails
        self.running: dict[int, RunConfig] = {}
        self.over: dict[int, str] = {}
        self.stopped: set[int] = set()
        self.starts: dict[int, int] = {}
        self.most_at_once = 0

    def ready(self, config: RunConfig) -> bool:
        return True

    def start(self, number: int, config: RunConfig) -> None:
        run = self.registry.find_run(str(config.name))
        assert number not in self.running, f"trial {number} is started while it runs"
        assert run is None or run.status != "FINISHED", f"trial {number} is run again"
        assert run is None or run.config == config.model_dump(mode="json"), f"trial {number} changed its values"
        if run is None:
            self.registry.create_run(str(config.name), "sft-long-context", config.model_dump(mode="json"))
        self.running[number] = config
        self.starts[number] = self.starts.get(number, 0) + 1
        self.most_at_once = max(self.most_at_once, len(self.running))
        self._set(config, status="RUNNING", cause=None, failure_class=None)

    def ended(self, number: int) -> str | None:
        return self.over.pop(number, None)

    def stop(self, number: int) -> None:
        self.stopped.add(number)

    def tick(self) -> None:
        """Every trial takes a step."""
        for number, config in list(self.running.items()):
            run = self.registry.get_run(str(config.name))
            step = run.progress.get("step", 0) + 1
            if number in self.stopped:
                self._over(number, "exit code 143", status="KILLED", cause="stopped from outside (TerminationSignal)")
            elif failure := self.fails(config, self.starts[number]):
                self._over(number, "exit code 1", status="FAILED", failure_class=failure[0], cause=failure[1])
            else:
                points = [[one, self.value(config, one)] for one in range(1, step + 1)]
                watched = {"metric": "loss", "points": points, "step": step, "value": points[-1][1]}
                self.registry.progress(run.id, {"step": step, "watched": watched})
                if step >= STEPS:
                    self._over(number, "exit code 0", status="FINISHED")

    def die(self) -> None:
        """The sweep was killed and its trials with it: what the reaper then says of them."""
        for config in self.running.values():
            self._set(config, status="FAILED", failure_class="infrastructure", cause="the flow's process is gone")
        self.running.clear()
        self.over.clear()
        self.stopped.clear()

    def _over(self, number: int, how: str, **columns: Any) -> None:
        self._set(self.running.pop(number), **columns)
        self.stopped.discard(number)
        self.over[number] = how

    def _set(self, config: RunConfig, **columns: Any) -> None:
        self.registry.update_run(self.registry.get_run(str(config.name)).id, **columns)


class FakeSweep:
    """What outlives a killed sweep: registry, study, trials; `run` is one life of the sweep's process."""

    def __init__(self, value: Callable[[RunConfig, int], float], fails: Any = None, **fields: Any) -> None:
        self.registry = Registry("sqlite:///:memory:")
        self.storage = FaultyStorage()
        self.runner = FakeRunner(self.registry, value, *([fails] if fails else []))
        self.config = sweep_config(SWEEP | fields)
        self.row = self.registry.create_sweep(str(self.config.name), self.config.model_dump(mode="json"))
        self.pruned: dict[str, str] = {}
        self.changes = 0

    def run(self, faults: Faults | None = None) -> None:
        faults = faults or Faults()
        self.storage.faults = faults
        registry: Any = FaultyRegistry(self.registry, faults)
        loop = SweepLoop(
            registry,
            self.row,
            Plan(self.config),
            Study(self.config, self.storage),
            self.runner,
            mark_pruned=lambda run, cause: self._mark(registry, run, cause),
            on_change=self._changed,
            pause=self.runner.tick,
        )
        try:
            loop.run()
        except Killed:
            self.runner.die()
            raise

    def _mark(self, registry: Any, run: RunRow, cause: str) -> None:
        registry.update_run(run.id, status="KILLED", cause=cause)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def trials(self) -> list[Any]:
        return self.registry.list_trials(self.row.id)


SWEEP: dict[str, Any] = {
    "name": "s",
    "kind": "sft",
    "base": {"model": "m", "dataset": {"path": "d.jsonl"}},
    "space": {"learning_rate": [1.0, 2.0, 3.0], "weight_decay": [0.0, 0.5]},
    "sampler": "grid",
    "metric": "loss",
    "average_steps": 1,
    "parallel": 2,
    "retry": {"backoff_s": 0},
}
