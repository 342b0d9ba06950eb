"""The sweep's loop with fake trials: every trial once, whatever dies and whenever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from flows.config import RunConfig
from flows.sweep_loop import SweepFailed
from flows.sweep_outcome import latest
from tests.flows.sweep_fakes import FakeSweep, Faults, Killed, outage


def value(config: RunConfig, step: int) -> float:
    return config.learning_rate + config.weight_decay + 1 / step


MEDIAN = {"type": "median", "startup_trials": 1, "warmup_steps": 2}
SPACES: dict[str, dict[str, Any]] = {
    "grid": {"sampler": "grid"},
    "random": {
        "sampler": "random",
        "trials": 5,
        "space": {"learning_rate": {"low": 0.1, "high": 5}, "weight_decay": [0.0, 0.5]},
    },
    "tpe": {"sampler": "tpe", "trials": 5, "space": {"learning_rate": {"low": 0.1, "high": 5, "log": True}}},
}


def check_whole(sweep: FakeSweep) -> None:
    """Every number once, ended, with its own values; and Optuna knows the same."""
    rows = latest(sweep.trials)
    assert [row.number for row in rows] == list(range(sweep.config.trial_count))
    assert all(row.status in ("FINISHED", "PRUNED") and row.ended_at for row in rows), [row.status for row in rows]
    assert len({row.key for row in sweep.trials}) == len(sweep.trials)
    if sweep.config.sampler == "grid":
        assert len({tuple(row.params.values()) for row in rows}) == sweep.config.grid_size
    for row in rows:
        run = sweep.registry.get_run(f"s-t{row.number}")
        assert run.id == row.run_id
        assert run.config["learning_rate"] == row.params["learning_rate"]
        if row.status == "FINISHED":
            assert run.status == "FINISHED" and row.value == run.progress["watched"]["value"]
        elif run.status != "FINISHED":  # else it ended before it could be stopped
            assert run.status == "KILLED" and str(run.cause).startswith("pruned at step ")
    told = [trial for trial in sweep.storage.get_all_trials(0) if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert sorted(trial.user_attrs["loopwright.trial"] for trial in told) == [row.number for row in rows]
    by_number = {trial.user_attrs["loopwright.trial"]: trial for trial in told}
    for row in rows:
        trial = by_number[row.number]
        assert trial.params == row.params
        assert (trial.state == TrialState.COMPLETE, trial.value) == (row.status == "FINISHED", row.value)
    unfinished = [trial for trial in sweep.storage.get_all_trials(0) if not trial.state.is_finished()]
    assert unfinished == []
    assert sweep.runner.running == {}


@pytest.mark.parametrize("sampler", SPACES)
def test_every_trial_is_run_once(sampler: str) -> None:
    sweep = FakeSweep(value, **SPACES[sampler])
    sweep.run()
    check_whole(sweep)
    assert set(sweep.runner.starts.values()) == {1}
    assert sweep.runner.most_at_once == 2
    assert sweep.changes == sweep.config.trial_count
    sweep.run()  # nothing is left to do
    assert set(sweep.runner.starts.values()) == {1}


@pytest.fixture(scope="module")
def writes() -> dict[str, int]:
    """How many writes a sweep of each kind makes when nothing disturbs it."""
    counts = {}
    for sampler, fields in SPACES.items():
        FakeSweep(value, pruning=MEDIAN, **fields).run(faults := Faults())
        counts[sampler] = faults.count
    assert min(counts.values()) > 30
    return counts


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_sweep_killed_at_any_write_loses_and_repeats_no_trial(writes: dict[str, int], data: st.DataObject) -> None:
    sampler = data.draw(st.sampled_from(sorted(SPACES)))
    kills = data.draw(st.lists(st.tuples(st.integers(1, writes[sampler]), st.booleans()), min_size=1, max_size=4))
    sweep = FakeSweep(value, pruning=MEDIAN, **SPACES[sampler])
    for at, after in kills:
        finished = {row.number: row.value for row in sweep.trials if row.status == "FINISHED"}
        with contextlib.suppress(Killed):
            sweep.run(Faults(at, after))
        assert finished.items() <= {row.number: row.value for row in sweep.trials if row.status == "FINISHED"}.items()
    sweep.run()
    check_whole(sweep)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_database_that_is_away_for_a_moment_ends_nothing(writes: dict[str, int], data: st.DataObject) -> None:
    sampler = data.draw(st.sampled_from(sorted(SPACES)))
    at, after = data.draw(st.integers(1, writes[sampler])), data.draw(st.booleans())
    sweep = FakeSweep(value, pruning=MEDIAN, **SPACES[sampler])
    sweep.run(Faults(at, after, outage))
    check_whole(sweep)
    assert max(sweep.runner.starts.values()) == 1


class AfterPruned(Faults):
    """The database goes away when it has just taken that a trial is stopped."""

    def around(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = write(*arguments, **options)
            if options.get("status") == "PRUNED" and not self.count:
                self.count = 1
                raise outage()
            return result

        return call


def test_a_trial_that_was_to_be_stopped_when_the_database_went_away_is_stopped() -> None:
    sweep = FakeSweep(value, space={"learning_rate": [1.0, 2.0, 9.0]}, parallel=1, pruning=MEDIAN, seed=0)
    sweep.run(faults := AfterPruned())
    check_whole(sweep)
    assert faults.count == 1
    stopped = [sweep.registry.get_run(f"s-t{row.number}") for row in sweep.trials if row.status == "PRUNED"]
    assert stopped and all(run.status == "KILLED" for run in stopped)


def test_a_trial_that_is_worse_is_stopped_and_frees_its_place() -> None:
    order = [1.0, 2.0, 9.0]
    sweep = FakeSweep(value, space={"learning_rate": order}, parallel=1, pruning=MEDIAN, seed=0)
    sweep.run()
    rows = {row.params["learning_rate"]: row for row in sweep.trials}
    ended = [row.params["learning_rate"] for row in sweep.trials]
    # Each is compared with those before it: all that are worse than the first ones are stopped at the end of the warm-up.
    for index, rate in enumerate(ended):
        worse = index > 0 and rate > sorted(ended[:index])[(index - 1) // 2]
        assert rows[rate].status == ("PRUNED" if worse else "FINISHED"), (ended, rate)
    stopped = [row for row in rows.values() if row.status == "PRUNED"]
    assert stopped
    run = sweep.registry.get_run(f"s-t{stopped[0].number}")
    assert run.cause == f"pruned at step 2, loss {stopped[0].value:.6g}: worse than other trials were there (median)"
    assert run.progress["step"] == 2


def test_a_lost_trial_goes_on_and_one_at_fault_does_not() -> None:
    def fails(config: RunConfig, start: int) -> tuple[str, str] | None:
        if config.learning_rate == 1.0 and start == 1:
            return "infrastructure", "the trainer ended: killed by SIGKILL"
        return ("divergence", "loss is nan") if config.learning_rate == 3.0 else None

    sweep = FakeSweep(value, fails, space={"learning_rate": [1.0, 2.0, 3.0]})
    sweep.run()
    by_rate = {rate: [row for row in sweep.trials if row.params["learning_rate"] == rate] for rate in (1.0, 2.0, 3.0)}
    assert [(row.attempt, row.status) for row in by_rate[1.0]] == [(1, "FAILED"), (2, "FINISHED")]
    assert [(row.attempt, row.status) for row in by_rate[2.0]] == [(1, "FINISHED")]
    assert [(row.attempt, row.status) for row in by_rate[3.0]] == [(1, "FAILED")]
    assert by_rate[1.0][0].run_id == by_rate[1.0][1].run_id


def test_a_sweep_whose_trials_all_fail_gives_up_with_the_cause() -> None:
    broken = FakeSweep(value, lambda config, start: ("user", "KeyError: answer"), limits={"failed_trials": 3})
    with pytest.raises(SweepFailed, match=r"3 trials failed in a row \(limits.failed_trials\), the last: KeyError: answer"):
        broken.run()
    assert len(broken.trials) in (3, 4)  # two at a time


def test_a_sweep_without_any_value_has_failed() -> None:
    sweep = FakeSweep(lambda config, step: float("nan"), space={"learning_rate": [1.0, 2.0]})
    with pytest.raises(SweepFailed, match="no trial has a value"):
        sweep.run()


def test_a_run_a_user_has_killed_is_a_failed_trial_and_not_started_again() -> None:
    sweep = FakeSweep(value, space={"learning_rate": [1.0, 2.0]}, parallel=1)
    tick, asked = sweep.runner.tick, []

    def tick_and_kill() -> None:
        if 0 in sweep.runner.running and not asked:
            asked.append(sweep.runner.stopped.add(0))
        tick()

    sweep.runner.tick = tick_and_kill  # type: ignore[method-assign]
    sweep.run()
    assert [row.status for row in sweep.trials] == ["FAILED", "FINISHED"]
    assert sweep.runner.starts == {0: 1, 1: 1}
