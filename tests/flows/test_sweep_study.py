"""Optuna beside the registry: its tables do not disturb ours, and what it is asked comes out as the config needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage
from sqlalchemy import create_engine, inspect

from flows.sweep_config import SweepConfig
from flows.sweep_file import sweep_config
from flows.sweep_study import Study, open_storage
from infra.registry import Registry
from tests.flows.sweep_fakes import SWEEP


def config(**fields: Any) -> SweepConfig:
    return sweep_config(SWEEP | {"sampler": "random", "trials": 8} | fields)


MIXED = {
    "learning_rate": {"low": 0.001, "high": 0.1, "log": True},
    "seed": {"low": 1, "high": 9, "step": 2, "int": True},
    "peft": [None, {"r": 8}],
    "shuffle": [True, False],
    "gradient_accumulation_steps": [1, 4],
    "dtype": ["float32", "bfloat16"],
}


def works(url: str) -> None:
    """A registry and a study in one database: either may come first, and both stay whole."""
    registry = Registry(url)
    row = registry.create_sweep("s", {})
    with open_storage(url) as storage:
        study = Study(config(), storage)
        params = study.ask(0)
        registry.record_trial(row.id, 0, "s:0:1", params=params, status="RUNNING")
        study.tell(0, "FINISHED", 0.5)
    registry.close()
    again = Registry(url)  # which looks at the schema again
    assert again.list_trials(row.id)[0].params == params
    again.close()
    with open_storage(url) as storage:
        assert Study(config(), storage).last_step(0) == 0
        (found,) = storage.get_all_studies()
        assert [trial.value for trial in storage.get_all_trials(found._study_id)] == [0.5]
    engine = create_engine(url)
    assert {"sweeps", "sweep_trials", "studies", "trials"} <= set(inspect(engine).get_table_names())
    engine.dispose()


def test_optuna_lives_in_the_registrys_sqlite_file(tmp_path: Path) -> None:
    works(f"sqlite:///{tmp_path / 'registry.db'}")


def test_optuna_lives_in_the_registrys_postgres(postgres_url: str) -> None:
    works(postgres_url)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_values_come_out_as_they_were_written_and_are_the_same_after_a_kill(sampler: str) -> None:
    drawn = []
    for _ in range(2):
        study = Study(config(space=MIXED, sampler=sampler), InMemoryStorage())
        drawn.append([study.ask(number) for number in range(8)])
    assert drawn[0] == drawn[1]
    for params in drawn[0]:
        assert 0.001 <= params["learning_rate"] <= 0.1
        assert type(params["seed"]) is int and params["seed"] in (1, 3, 5, 7, 9)
        assert params["peft"] in (None, {"r": 8})
        assert type(params["shuffle"]) is bool and type(params["gradient_accumulation_steps"]) is int
    assert len({str(params) for params in drawn[0]}) == 8
    assert Study(config(space=MIXED, sampler=sampler, seed=1), InMemoryStorage()).ask(0) != drawn[0][0]


def test_given_values_are_taken_and_told_once() -> None:
    storage = InMemoryStorage()
    study = Study(config(space=MIXED), storage)
    values = {
        "learning_rate": 0.05,
        "seed": 3,
        "peft": {"r": 8},
        "shuffle": False,
        "gradient_accumulation_steps": 4,
        "dtype": "float32",
    }
    assert study.ask(4, values) == values
    study.tell(4, "FINISHED", 2.0)
    study.tell(4, "FINISHED", 9.0)
    study.tell(5, "FAILED")  # of which it knows nothing
    (trial,) = storage.get_all_trials(0)
    assert trial.value == 2.0
    study.take_up(4, values)  # tried again after all
    assert [trial.state.name for trial in storage.get_all_trials(0)] == ["COMPLETE", "RUNNING"]


def test_a_metric_that_is_to_be_small_is_minimized() -> None:
    for fields, direction in (
        ({}, "MINIMIZE"),
        ({"metric": "token_accuracy"}, "MAXIMIZE"),
        ({"direction": "maximize"}, "MAXIMIZE"),
    ):
        storage = InMemoryStorage()
        Study(config(**fields), storage)
        assert storage.get_study_directions(0)[0].name == direction


def after_good_ones(pruning: dict[str, Any]) -> Study:
    study = Study(config(pruning=pruning), InMemoryStorage(), max_steps=9)
    for number in range(6):
        study.ask(number)
        study.report(number, [(step, 0.1 * number) for step in range(1, 10)], compare=False)
        study.tell(number, "FINISHED", 0.1 * number)
    return study


def test_median_stops_what_is_worse_after_the_warm_up() -> None:
    study = after_good_ones({"type": "median", "startup_trials": 1, "warmup_steps": 3})
    study.ask(6)
    assert study.report(6, [(1, 99.0), (2, 99.0)]) is None
    assert study.report(6, [(step, 99.0) for step in range(1, 10)]) == 3 == study.last_step(6)
    assert study.report(6, [(step, 99.0) for step in range(1, 4)]) is None  # what was told is not told again
    study.tell(6, "PRUNED")
    study.ask(7)
    assert study.report(7, [(step, 0.0) for step in range(1, 10)]) is None  # the best goes on


def test_hyperband_stops_what_is_worse_in_its_race() -> None:
    study, stopped = after_good_ones({"type": "hyperband", "warmup_steps": 2}), []
    for number in range(6, 12):  # which race a trial is in is drawn; one of the races lets everybody finish
        study.ask(number)
        stopped.append(study.report(number, [(step, 99.0) for step in range(1, 10)]))
        study.tell(number, "PRUNED" if stopped[-1] else "FINISHED", 99.0)
    assert any(stopped) and all(step is None or step >= 2 for step in stopped)


def test_importance_says_what_mattered_once_there_are_enough() -> None:
    space = {"learning_rate": {"low": 0.0, "high": 1.0}, "weight_decay": {"low": 0.0, "high": 1.0}, "seed": [7]}
    study = Study(config(space=space, trials=12), InMemoryStorage())
    for number in range(12):
        params = study.ask(number)
        if number == 3:
            assert study.importance() == {}
        study.tell(number, "FINISHED", 10 * params["learning_rate"] + 0.01 * params["weight_decay"])
    found = study.importance()
    assert list(found) == ["learning_rate", "weight_decay"] and found["learning_rate"] > 0.8


def test_importance_of_trials_that_are_all_alike_is_not_known() -> None:
    study = Study(config(), InMemoryStorage())
    for number in range(5):
        study.ask(number)
        study.tell(number, "FINISHED", 1.0)
    assert study.importance() == {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
