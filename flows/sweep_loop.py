"""The loop of a sweep: start trials, look at them, stop those that are not worth it, until every trial has ended.

    study.ask ─▶ row RUNNING ─▶ runner.start ─▶ run (a process of its own) ─▶ ended ─▶ row FINISHED, FAILED ─▶ study.tell
                                    │ values by step ─▶ should stop ─▶ row PRUNED ─▶ study.tell ─▶ runner.stop ─▶ run KILLED

Invariants, kept when the process is killed between any two of these:
- a trial's row is written before its process starts, and says what became of it before anything else is told so: `take_up`
  does again what follows from a row, and each of these things may be done twice;
- trial `number` is the run `<sweep>-t<number>`, so a trial that is taken up goes on from the run's last checkpoint, and one
  whose run is finished is not run again;
- every number below `config.trial_count` gets exactly one set of values; a further attempt is a row with the same ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DBAPIError

from flows.config import RunConfig
from flows.config_file import ConfigErrors
from flows.sweep_outcome import failure_cause, latest, may_go_on, points_of, pruned_cause, record_attempt, value_of
from flows.sweep_space import Params, Plan, label, trial_name
from flows.sweep_study import Study
from infra.registry import Registry, RunRow
from infra.registry_records import SweepRow, TrialRow
from trainers.errors import LoopwrightError

logger = logging.getLogger(__name__)
MOST_DRAWS = 20


class SweepFailed(LoopwrightError):
    """A sweep ended without success; `str()` is the cause, in one line first."""


class Runner(Protocol):
    """Runs trials, each in a process of its own."""

    def ready(self, config: RunConfig) -> bool:
        """Whether this trial could start now: its devices are free, and no older process of its run is left."""
        ...

    def start(self, number: int, config: RunConfig, /) -> None:
        """Begin or resume the run of trial `number`."""
        ...

    def ended(self, number: int, /) -> str | None:
        """How the trial's process ended; None: it runs."""
        ...

    def stop(self, number: int, /) -> None:
        """Ask the trial to end; it takes as long as it needs to."""
        ...


class SweepLoop:
    """One sweep at work. `mark_pruned(run, cause)` makes a stopped trial's run say so; `on_change` is called when a trial has
    ended; `pause` between two looks."""

    def __init__(
        self,
        registry: Registry,
        sweep: SweepRow,
        plan: Plan,
        study: Study,
        runner: Runner,
        mark_pruned: Callable[[RunRow, str], None],
        on_change: Callable[[], None],
        pause: Callable[[], None],
        parent_run: str | None = None,
    ) -> None:
        self.registry, self.sweep, self.plan, self.study, self.runner = registry, sweep, plan, study, runner
        self._mark_pruned, self._on_change, self._pause, self._parent_run = mark_pruned, on_change, pause, parent_run
        self._grid = plan.grid() if plan.config.sampler == "grid" else None
        self._active: dict[int, TrialRow] = {}  # by number; not RUNNING: it was asked to stop
        self._waiting: list[tuple[float, TrialRow]] = []  # attempts with a row, to be started not before a time
        self._new: deque[int] = deque()
        self._processes: set[int] = set()  # trials whose process was started here and is not known to have ended
        self._failures = 0  # in a row

    def run(self) -> None:
        """Returns when every trial has ended and one has a value.

        Raises:
            SweepFailed: no trial has, or too many failed in a row.
        """
        known = False
        while True:
            try:
                if not known:
                    self.take_up()
                    known = True
                self._step()
            except (DBAPIError, StorageInternalError) as error:  # trials go on without the database, and so does this
                if known:
                    logger.warning("the database did not take it, trying until it does: %s", str(error).splitlines()[0])
                known = False
            if known and not (self._active or self._waiting or self._new):
                break
            self._pause()
        rows = latest(self.registry.list_trials(self.sweep.id))
        if not any(row.status == "FINISHED" for row in rows):
            raise SweepFailed(f"no trial has a value: {self._first_cause(rows)}")

    def take_up(self) -> None:
        """What is known of the sweep's trials: what was decided is done, what was begun goes on, the rest is new."""
        self._active, self._waiting = {}, []
        rows = self.registry.list_trials(self.sweep.id)
        newest = {row.number: row for row in latest(rows)}
        self.study.drop_unused(newest)
        for row in rows:
            if row.status == "RUNNING" and row.attempt < newest[row.number].attempt:
                self.registry.update_trial(row.key, status="FAILED", ended_at=time.time())
        for number, row in newest.items():
            if row.status == "RUNNING":
                self.study.take_up(number, row.params)
            if number in self._processes:
                self._active[number] = row
                if row.status != "RUNNING":
                    self.runner.stop(number)
            elif row.status == "RUNNING":
                self._waiting.append((0.0, row))
            else:
                self._settle(row)
        self._new = deque(number for number in range(self.plan.config.trial_count) if number not in newest)

    def _step(self) -> None:
        for number in list(self._active):
            self._look(number)
        while len(self._active) < self.plan.config.parallel and self._start_one():
            pass

    def _start_one(self) -> bool:
        """Start the next trial, if there is one and room for it."""
        entry = next((entry for entry in self._waiting if entry[0] <= time.monotonic()), None)
        if entry is None:
            if not self._new:
                return False
            number = self._new[0]
            row = record_attempt(self.registry, self.sweep, number, 1, self._draw(number))
            self._new.popleft()
            self._waiting.append(entry := (0.0, row))
        row = entry[1]
        run = self.registry.find_run(trial_name(self.sweep.name, row.number))
        if run is not None and run.status == "FINISHED":  # it ended while nobody looked
            self._end(row, run, "")
        else:
            config = self.plan.trial_config(row.number, row.params, self._parent_run)
            if not self.runner.ready(config):
                return False
            print(f"trial {row.number} starts: {label(row.params)}", flush=True)
            self._processes.add(row.number)
            self._active[row.number] = row
            self.runner.start(row.number, config)
        self._waiting.remove(entry)
        return True

    def _draw(self, number: int) -> Params:
        """Values that make a valid config."""
        for draw in range(MOST_DRAWS):
            params = self.study.ask(number, self._grid[number] if self._grid is not None else None, draw)
            try:
                self.plan.trial_config(number, params)
                return params
            except ConfigErrors as error:
                self.study.tell(number, "FAILED")
                refused = error
        raise SweepFailed(f"{MOST_DRAWS} draws for trial {number} gave no valid config, the last: {refused}")

    def _look(self, number: int) -> None:
        """One look at a running trial: its values so far, and whether its process has ended."""
        row = self._active[number]
        how = self.runner.ended(number)  # asked first: what a process wrote before its end is seen below
        run = self.registry.find_run(trial_name(self.sweep.name, number))
        if run is not None and row.run_id is None:
            row = self._active[number] = self.registry.update_trial(row.key, run_id=run.id)
        if how is None:
            if run is not None and row.status == "RUNNING":
                self._compare(row, run)
            return
        self._processes.discard(number)
        if row.status == "RUNNING":
            self._end(row, run, how)
        else:
            self._settle(row)
            self._on_change()
        self._active.pop(number, None)

    def _compare(self, row: TrialRow, run: RunRow) -> None:
        number, points = row.number, points_of(run)
        step = self.study.report(number, points)
        if step is None:
            return
        value = dict(points)[step]
        cause = pruned_cause(self.plan, step, value)
        self._active[number] = self.registry.update_trial(row.key, status="PRUNED", value=value, ended_at=time.time())
        print(f"trial {number} is stopped: {cause}", flush=True)
        self._failures = 0
        self.runner.stop(number)
        self.study.tell(number, "PRUNED")

    def _end(self, row: TrialRow, run: RunRow | None, how: str) -> None:
        """A trial has ended by itself: its value, another attempt, or its failure."""
        metric, retry, run_id = self.plan.config.metric, self.plan.config.retry, run and run.id
        value = value_of(run, metric) if run is not None and run.status == "FINISHED" else None
        cause = "" if value is not None else failure_cause(run, how, metric)
        if value is None and may_go_on(run) and row.attempt <= retry.infrastructure:
            print(f"trial {row.number} goes on: {cause}", flush=True)
            # The next attempt's row comes first: killed here, the trial is not taken for failed.
            again = record_attempt(self.registry, self.sweep, row.number, row.attempt + 1, row.params, run_id)
            self.registry.update_trial(row.key, status="FAILED", ended_at=time.time())
            self._waiting.append((time.monotonic() + retry.backoff_s, again))
            return
        status = "FAILED" if value is None else "FINISHED"
        row = self.registry.update_trial(row.key, status=status, value=value, ended_at=time.time(), run_id=run_id)
        print(f"trial {row.number} failed: {cause}" if cause else f"trial {row.number}: {metric} {value:.6g}", flush=True)
        if run is not None and value is not None:
            self.study.report(row.number, points_of(run), compare=False)
        self._settle(row)
        self._on_change()
        self._failures = self._failures + 1 if cause else 0
        if self._failures >= (most := self.plan.config.limits.failed_trials):
            raise SweepFailed(f"{most} trials failed in a row (limits.failed_trials), the last: {cause}")

    def _settle(self, row: TrialRow) -> None:
        """What follows from the end of a trial; may be done again."""
        self.study.tell(row.number, row.status, row.value)
        if row.status != "PRUNED":
            return
        run = self.registry.find_run(trial_name(self.sweep.name, row.number))
        cause = pruned_cause(self.plan, self.study.last_step(row.number), row.value)
        if run is not None and run.status != "FINISHED" and (run.status, run.cause) != ("KILLED", cause):
            self._mark_pruned(run, cause)

    def _first_cause(self, rows: list[TrialRow]) -> str:
        for row in rows:
            run = self.registry.find_run(trial_name(self.sweep.name, row.number))
            if row.status == "FAILED" and run is not None and run.cause:
                return f"trial {row.number}: {run.cause.splitlines()[0]}"
        return f"all {len(rows)} were stopped or failed"
