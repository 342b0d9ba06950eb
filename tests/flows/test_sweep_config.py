"""Sweep configs: what is refused, in whose words, and what the trials of a good one are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flows.config_file import ConfigErrors
from flows.sweep_config import Dimension, SweepConfig
from flows.sweep_file import load_sweep, sweep_config
from flows.sweep_space import Plan, checked, field_path, inlined
from tests.flows.sweep_fakes import SWEEP


def plan(**fields: Any) -> Plan:
    return Plan(sweep_config(SWEEP | fields))


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigErrors) as error:
        checked(sweep_config(SWEEP | fields))
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"space": {"learning_rat": [1.0]}}, "unknown field `learning_rat` in SFTRunConfig: did you mean `learning_rate`?"),
        ({"space": {"trainer.rank": [1, 2]}}, "did you mean `ranks`?"),
        ({"space": {"storage.uri": ["a"]}}, "space.storage.uri: cannot vary: `storage` of the sweep is for all trials"),
        ({"space": {"learning_rate": [1.0], "optim.learning_rate": [2.0]}}, "is the field that space.learning_rate names"),
        ({"space": {}}, "space: Dictionary should have at least 1 item"),
        ({"space": {"seed": {"low": 1, "high": 2}}}, "space.seed: a grid has values: add a `step` to the range"),
        ({"space": {"seed": {"low": 2, "high": 1}}}, "low=2 is not below high=1"),
        ({"space": {"seed": {"low": 0, "high": 1, "log": True}}}, "low=0 has no logarithm"),
        ({"space": {"seed": {"low": 0, "high": 1.5, "int": True}}}, "a range of whole numbers has whole low, high and step"),
        ({"space": {"seed": {"low": 0, "high": 10, "step": 4, "int": True}}}, "write high=8, or another step"),
        ({"space": {"seed": {"values": [1], "low": 0}}}, "has `values` and low"),
        ({"space": {"seed": {}}}, "write `values: […]`, or a range by `low` and `high`"),
        ({"space": {"seed": [1, 1]}}, "values names 1 twice"),
        ({"space": {"seed": {"valeus": [1]}}}, "did you mean `values`?"),
        ({"trials": 7}, "trials: the grid has 6 combinations, so 7 trials are too many"),
        ({"sampler": "tpe"}, "trials: is required with sampler=tpe"),
        ({"metric": "los"}, "there is no metric `los`: did you mean `loss`?"),
        ({"metric": "reward"}, "sft has no `reward`: it is a metric of grpo"),
        ({"metric": "sweep/best"}, "sft has no `sweep/best`"),
        ({"metric": "accuracy"}, "metric=accuracy is measured on a held-out set: give base.eval.dataset"),
        ({"pruning": "mediun"}, "pruning.type: Input should be 'none', 'median' or 'hyperband' (got 'mediun')"),
        ({"pruning": {"type": "hyperband", "startup_trials": 2}}, "startup_trials is of median pruning, this is hyperband"),
        ({"name": "a b"}, "a sweep's name has letters"),
        ({"base": {"model": "m"}}, "dataset: is required and not set"),
        (
            {"base": {**SWEEP["base"], "max_step": 3}},
            "base: unknown field `max_step` in SFTRunConfig: did you mean `max_steps`?",
        ),
        ({"base": {**SWEEP["base"], "hub_token": "${oc.env:NOT_SET_ANYWHERE}"}}, "NOT_SET_ANYWHERE"),
        ({"trial": 3}, "unknown field `trial` in SweepConfig: did you mean `trials`?"),
        ({"kind": "dpo"}, "kind: Input should be 'grpo', 'distillation' or 'sft' (got 'dpo')"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(fields: dict[str, Any], says: str) -> None:
    assert says in refused(**fields)


def test_a_bad_combination_is_refused_with_its_trial() -> None:
    text = refused(space={"trainer.ranks": [1, 2], "trainer.gpus": [1, 2]})
    bad = [line for line in text.splitlines() if "each rank takes one GPU" in line]
    assert len(bad) == 2 and all(line.startswith("trial ") and "(trainer.ranks=" in line for line in bad)
    # And so is one value of a space that is sampled, without drawing any.
    drawn = {"sampler": "random", "trials": 2, "space": {"learning_rate": {"low": -1, "high": 1}, "seed": [1, 2]}}
    assert "(learning_rate=-1.0, seed=1): learning_rate: Input should be greater than or equal to 0 (got -1.0)" in refused(
        **drawn
    )


def test_trials_at_the_same_time_do_not_share_a_server_that_is_trained() -> None:
    base = {**SWEEP["base"], "reward_funcs": ["a:b"], "servers": {"student": {"url": "http://h:1"}}}
    fields = {"kind": "grpo", "metric": "reward", "base": base, "space": {"learning_rate": [1.0, 2.0]}}
    assert "base: servers.student.url: trials at the same time would send their weights" in refused(**fields)
    checked(sweep_config(SWEEP | fields | {"parallel": 1}))
    checked(sweep_config(SWEEP | fields | {"space": {"servers.student.url": ["http://h:1", "http://h:2"]}}))


def test_pruning_by_accuracy_needs_evaluations_while_a_trial_trains() -> None:
    base = {**SWEEP["base"], "eval": {"dataset": {"path": "e"}, "reward_func": "a:b"}}
    fields = {"metric": "accuracy", "base": base, "pruning": "median"}
    assert "set base.eval.every" in refused(**fields)
    checked(sweep_config(SWEEP | fields | {"base": {**base, "eval": {**base["eval"], "every": 5}}}))


def test_many_bad_trials_are_not_all_listed() -> None:
    lines = refused(space={"learning_rate": [-1.0 - index for index in range(9)]}).splitlines()
    assert len(lines) == 6 and lines[-1] == "and 4 more"


def test_trials_of_a_grid_are_every_combination_once_in_an_order_of_the_seed() -> None:
    trials = plan().grid()
    assert len(trials) == 6 and len({tuple(params.values()) for params in trials}) == 6
    assert plan().grid() == trials != plan(seed=1).grid()
    assert plan(trials=2).grid() == trials[:2]


def test_a_trial_is_a_run_config_that_says_what_it_is_of() -> None:
    trial = plan(pruning={"type": "median", "every_steps": 5}, average_steps=None).trial_config(
        3, {"learning_rate": 0.5}, "parent"
    )
    assert (trial.name, trial.learning_rate, trial.model) == ("s-t3", 0.5, "m")
    assert trial.tags == {"loopwright.sweep": "s", "loopwright.trial": "3", "mlflow.parentRunId": "parent"}
    assert trial.sweep is not None
    assert trial.sweep.model_dump() == {"name": "s", "trial": 3, "watch": "loss", "average_steps": 10, "every_steps": 5}


def test_a_value_replaces_what_the_base_has_also_where_both_are_mappings() -> None:
    base = {**SWEEP["base"], "peft": {"r": 4, "lora_alpha": 64}, "optim": {"learning_rate": 0.1}}
    made = checked(sweep_config(SWEEP | {"base": base, "space": {"peft": [{"r": 8}, None], "optim.learning_rate": [0.2]}}))
    configs = [made.trial_config(number, params) for number, params in enumerate(made.grid())]
    by_rank = {config.peft and config.peft.r: config for config in configs}
    assert set(by_rank) == {8, None}
    assert by_rank[8].peft is not None and by_rank[8].peft.lora_alpha != 64
    assert {config.learning_rate for config in configs} == {0.2}
    assert field_path("optim.learning_rate") == ("learning_rate",)


def test_a_list_item_of_the_base_can_vary() -> None:
    base = {**SWEEP["base"], "eval": {"dataset": {"path": "e"}, "reward_func": {"path": "a:b", "kwargs": {"x": 1}}}}
    made = plan(base=base, space={"eval.reward_func.kwargs.x": [2, 3]})
    made.check()
    config = made.trial_config(0, {"eval.reward_func.kwargs.x": 3})
    assert config.eval and config.eval.reward_func and config.eval.reward_func.kwargs == {"x": 3}


def test_a_base_from_a_file_is_taken_in_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text("name: alone\nmodel: m\ndataset: {path: rows.jsonl}\nmax_steps: 9\n")
    sweep = {key: value for key, value in SWEEP.items() if key != "base"} | {"base_file": "run.yaml", "base": {"max_steps": 7}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOPWRIGHT_SAVE_STEPS", "3")
    settings = ["space.learning_rate.values=[5.0]", "parallel=3", "base.trainer.ranks=2", "tracking.experiment=mine"]
    config = inlined(load_sweep(tmp_path / "sweep.yaml", settings), with_environment=True)
    assert config.base_file is None and config.parallel == 3
    assert config.base == {
        "model": str(tmp_path / "m"),
        "dataset": {"path": str(tmp_path / "rows.jsonl")},
        "max_steps": 7,
        "save_steps": 3,
        "trainer": {"ranks": 2},
        "tracking": {"experiment": "mine"},
    }
    assert config.space["learning_rate"].values == [5.0]
    monkeypatch.chdir("/")
    monkeypatch.delenv("LOOPWRIGHT_SAVE_STEPS")
    assert inlined(config, with_environment=False) == config


@pytest.mark.parametrize("pruning", ["none", "median", "hyperband"])
def test_a_stored_config_is_read_back_as_it_was(pruning: str) -> None:
    config = sweep_config(SWEEP | {"pruning": pruning, "space": {"learning_rate": {"low": 1, "high": 2, "step": 0.5}}})
    assert SweepConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("setting", "space"),
    [
        ("space.seed=[1, 2]", {"seed": {"values": [1, 2]}}),
        ("space.seed={low: 1, high: 5, int: true}", {"seed": {"low": 1.0, "high": 5.0, "int": True}}),
        ("space.eval.every.values=[4]", {"eval.every": {"values": [4]}}),
        ("space.learning_rate.high=9", {"learning_rate": {"low": 1.0, "high": 9.0}}),
    ],
)
def test_the_space_on_the_command_line(tmp_path: Path, setting: str, space: dict[str, Any]) -> None:
    tree = SWEEP | {"sampler": "random", "trials": 2, "space": {"learning_rate": {"low": 1.0, "high": 2.0}}}
    (tmp_path / "sweep.json").write_text(json.dumps(tree))
    loaded = load_sweep(tmp_path / "sweep.json", [setting])
    shown = {name: dimension.model_dump(exclude_defaults=True) for name, dimension in loaded.space.items()}
    assert shown == {"learning_rate": {"low": 1.0, "high": 2.0}} | space


def test_a_run_config_given_as_a_sweep_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\ndataset: {path: d}\n")
    with pytest.raises(ConfigErrors, match="this looks like a run config"):
        load_sweep(tmp_path / "run.yaml")
    with pytest.raises(ConfigErrors, match="cannot be read: No such file"):
        load_sweep(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("[1]\n")
    with pytest.raises(ConfigErrors, match="this is a list"):
        load_sweep(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("{}\n")
    with pytest.raises(ConfigErrors, match="`trials` is not of the form field=value"):
        load_sweep(tmp_path / "empty.yaml", ["trials"])


@given(st.integers(-50, 50), st.integers(1, 60), st.integers(1, 7))
def test_points_of_a_range_are_its_ends_and_every_step_between(low: int, steps: int, step: int) -> None:
    high = low + steps * step
    points = Dimension.model_validate({"low": low, "high": high, "step": step, "int": True}).points()
    assert points == list(range(low, high + 1, step))
    tenths = Dimension.model_validate({"low": low / 10, "high": high / 10, "step": step / 10}).points()
    assert tenths == [value / 10 for value in range(low, high + 1, step)]
