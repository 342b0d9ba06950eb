"""What a recipe says of its stages, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from flows.config import GRPORunConfig, SFTRunConfig
from flows.config_file import ConfigErrors, describe
from flows.recipe_config import RecipeConfig
from flows.recipe_plan import LATER, Plan, load_recipe, located
from flows.recipe_runs import preflight_stages
from tests.support.tiny_model import build_tiny_model

REWARD = "trainers.rewards:exact_match_reward"


def domain(**fields: Any) -> dict[str, Any]:
    return {"dataset": {"path": "a.jsonl"}, "reward_funcs": [REWARD], "eval": {"dataset": {"path": "held.jsonl"}}, **fields}


def recipe(**fields: Any) -> dict[str, Any]:
    return {
        "name": "r",
        "model": "base",
        "shared": {"seed": 3},
        "sft": {"dataset": {"path": "sft.jsonl"}, "max_steps": 5},
        "grpo": {"max_steps": 7, "num_generations": 4, "max_completion_length": 16},
        "domains": {"add": domain(), "order": domain(overrides={"max_steps": 9})},
        "merge": {"beta": 1.0, "max_steps": 11},
        **fields,
    }


def plan(**fields: Any) -> Plan:
    return Plan(RecipeConfig.model_validate(recipe(**fields)))


def lines(**fields: Any) -> list[str]:
    """What is wrong with a recipe, whoever notices it."""
    try:
        plan(**fields).stages()
    except ValidationError as error:
        return describe(error)
    except ConfigErrors as error:
        return error.lines
    return []


def test_stages_have_what_is_shared_what_is_theirs_and_what_the_recipe_gives_them():
    made = plan(tags={"team": "a"}, tracking={"experiment": "e"}, storage={"uri": "/tmp/x"})
    sft, add, order = made.sft("p1"), made.specialist("add", "/sft", "p1"), made.specialist("order", "/sft")
    assert isinstance(sft, SFTRunConfig) and isinstance(add, GRPORunConfig)
    assert [stage.name for stage in (sft, add, order)] == ["r-sft", "r-add", "r-order"]
    assert [stage.model for stage in (sft, add, order)] == ["base", "/sft", "/sft"]
    assert [stage.max_steps for stage in (sft, add, order)] == [5, 7, 9]
    for stage in (sft, add, order):
        assert (stage.seed, stage.tracking.experiment, stage.storage.uri, stage.tags["team"]) == (3, "e", "/tmp/x", "a")
    assert sft.tags["mlflow.parentRunId"] == "p1" and "mlflow.parentRunId" not in order.tags
    assert add.tags["loopwright.stage"] == "add" and add.reward_funcs[0].path == REWARD
    assert add.eval is None  # measured for the table, not by every run once more


def test_the_student_is_taught_by_every_domains_specialist_in_the_order_of_the_domains():
    merged = plan().merge("/sft", {"add": "/a", "order": "/o"}, "/prompts.jsonl")
    assert (merged.name, merged.model, merged.dataset.path, merged.max_steps) == ("r-merged", "/sft", "/prompts.jsonl", 11)
    assert {name: teacher.model for name, teacher in merged.servers.teachers.items()} == {"add": "/a", "order": "/o"}
    assert list(merged.servers.teachers) == ["add", "order"]


def test_a_teacher_that_is_up_is_asked_as_it_is():
    served = {"servers": {"teachers": {"add": {"url": "http://10.0.0.1:8001"}, "order": {"gpus": 1}}}}
    made = plan(domains={"add": domain(specialist="/a"), "order": domain()}, merge=served)
    add, order = made.merge("/sft", {"add": "/a", "order": "/o"}, "/prompts.jsonl").servers.teachers.values()
    assert (add.url, add.model) == ("http://10.0.0.1:8001", None) and (order.model, order.gpus) == ("/o", 1)


def test_a_run_that_asks_for_evaluations_gets_the_domains_held_out_problems():
    made = plan(grpo={"max_steps": 7, "eval": {"every": 2}})
    add = made.specialist("add", "/sft")
    assert add.eval is not None and (add.eval.every, add.eval.dataset.path) == (2, "held.jsonl")


def test_what_a_domains_accuracy_is_measured_by():
    own = {"dataset": {"path": "h.jsonl", "max_rows": 5}, "reward_func": "rewards:other", "max_completion_length": 3}
    made = plan(domains={"add": domain(), "order": domain(eval=own), "third": domain(eval=None)})
    add, order = made.evaluation("add", "/m"), made.evaluation("order", "/m")
    assert add is not None and order is not None
    assert (add.model, add.max_completion_length, add.reward_func and add.reward_func.path) == ("/m", 16, REWARD)
    assert (order.max_completion_length, order.reward_func and order.reward_func.path) == (3, "rewards:other")
    assert made.evaluation("third", "/m") is None
    shown = plan(shared={"chat_template_kwargs": {"enable_thinking": False}}).evaluation("add", "/m")
    assert shown is not None and shown.chat_template_kwargs == {"enable_thinking": False}  # as the specialist is trained


def test_specialists_that_are_there_already_are_not_trained():
    there = {"dataset": {"path": "a.jsonl"}, "specialist": "org/specialist"}
    made = plan(sft=None, domains={"add": there, "order": domain()})
    assert made.trained == ["order"] and [stage.name for stage in made.stages()] == ["r-order", "r-merged"]
    assert made.stages()[-1].servers.teachers["add"].model == "org/specialist"
    assert made.stages()[-1].servers.teachers["order"].model == LATER


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"domains": {"add": domain()}}, "domains: Dictionary should have at least 2 items"),
        ({"domains": {"add": domain(), "sft": domain()}}, "domains: 'sft' is what another model of the recipe is called"),
        ({"domains": {"add": domain(), "a b": domain()}}, "domains: 'a b' cannot name a domain"),
        ({"domains": {"add": domain(), "o": domain(reward_funcs=[])}}, "domains.o: reward_funcs is empty"),
        ({"domains": {"add": domain(), "o": domain(specialist="s", overrides={"max_steps": 1})}}, "domains.o: has `overrides`"),
        ({"name": "a/b"}, "name: a recipe's name has letters"),
        ({"shared": {"model": "x"}}, "shared.model: is said by `model` of the recipe"),
        ({"grpo": {"dataset": {"path": "x"}}}, "grpo.dataset: is said by `domains.<name>.dataset`"),
        ({"merge": {"tracking": {}}}, "merge.tracking: is said by `tracking` of the recipe"),
        (
            {"merge": {"servers": {"teachers": {"addd": {}}}}},
            "merge.servers.teachers.addd: there is no such domain: add, order",
        ),
        (
            {"merge": {"servers": {"teachers": {"add": {"url": "http://10.0.0.1:8001"}}}}},
            "merge.servers.teachers.add.url: the specialist that is trained for this domain would teach nobody",
        ),
        ({"grpo": {"max_steps": 7, "peft": {"r": 4}}}, "stage add: peft: its checkpoint would be an adapter"),
        ({"sft": {"max_steps": 5}}, "dataset: is required and not set"),
        ({"grpo": {"learning_rte": 1}}, "grpo: unknown field `learning_rte`"),
        (
            {"domains": {"add": domain(), "order": domain(overrides={"max_steps": "many"})}},
            "domains.order.overrides: max_steps: Input should be a valid integer",
        ),
        ({"merge": {"servers": {"teachers": {"add": {"gpuss": 1}}}}}, "merge: servers.teachers.add: unknown field `gpuss`"),
        ({"merge": {"beta": 2}}, "merge: beta: Input should be less than or equal to 1"),
        ({"shared": {"num_generations": 4}}, "shared: unknown field `num_generations` in SFTRunConfig"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(fields: dict[str, Any], told: str):
    assert any(line.startswith(told) for line in lines(**fields)), lines(**fields)


def test_the_student_alone_may_be_an_adapter():
    assert not lines(merge={"peft": {"r": 4}})


def test_all_stages_problems_are_told_at_once():
    found = lines(sft={"dataset": {"path": "x"}, "max_steps": "a"}, grpo={"max_steps": "b"}, merge={"max_steps": "c"})
    assert [line.split(":")[0] for line in found if "max_steps" in line] == ["sft", "grpo", "merge"]


def test_a_file_with_overrides_names_what_is_here_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "held.jsonl", "sft.jsonl", "rewards.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "base").mkdir()
    fields = recipe(storage={"uri": "runs"}, domains={"add": domain(reward_funcs=["rewards.py:score"]), "order": domain()})
    (tmp_path / "recipe.json").write_text(json.dumps(fields))
    config = load_recipe(tmp_path / "recipe.json", ["grpo.max_steps=3", "domains.add.overrides.learning_rate=1e-5"])
    assert (config.model, config.storage.uri) == (str(tmp_path / "base"), str(tmp_path / "runs"))
    assert config.domains["add"].dataset.path == str(tmp_path / "a.jsonl")
    assert config.domains["add"].reward_funcs[0].path == f"{tmp_path}/rewards.py:score"
    assert config.sft is not None and config.sft["dataset"]["path"] == str(tmp_path / "sft.jsonl")
    assert (config.grpo["max_steps"], config.domains["add"].overrides) == (3, {"learning_rate": 1e-5})
    assert located(config) == config


def test_what_the_merging_would_be_refused_for_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    """A model that takes 64 tokens cannot teach a student whose server takes as many."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "answer": "2", "completion": "2"}) + "\n")
    data = {"dataset": {"path": str(rows)}}
    fields = {"model": str(tmp_path), "sft": {**data, "max_steps": 5}}
    fields["domains"] = {name: domain(**data, eval=data) for name in ("add", "order")}

    def student(length: int, **more: Any) -> Plan:
        return plan(**fields, merge={"servers": {"student": {"max_model_len": length, **more}}})

    preflight_stages(student(63))
    with pytest.raises(ConfigErrors) as told:
        preflight_stages(student(64, gpus=4096))
    assert [line.split(":")[:2] for line in told.value.lines] == [
        ["merge", " servers.teachers.add"],
        ["merge", " servers.teachers.order"],
        ["merge", " servers, trainer.gpus"],
    ]
    assert all("set servers.student.max_model_len=63 or less" in line for line in told.value.lines[:2])


def test_models_that_are_not_there_are_named_by_the_recipes_own_fields(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1"}) + "\n")
    domains = {name: {"dataset": {"path": str(rows)}, "specialist": f"/nowhere/{name}"} for name in ("add", "order")}
    with pytest.raises(ConfigErrors) as told:
        preflight_stages(plan(model="/nowhere/base", sft=None, domains=domains))
    assert told.value.lines == [
        "model: there is no folder /nowhere/base",
        "domains.add.specialist: there is no folder /nowhere/add",
        "domains.order.specialist: there is no folder /nowhere/order",
    ]


def test_a_specialist_with_another_vocabulary_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "answer": "2", "completion": "2"}) + "\n")
    build_tiny_model(tmp_path / "base")
    build_tiny_model(tmp_path / "alike", seed=1)
    other = build_tiny_model(tmp_path / "other", seed=2)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    data = {"dataset": {"path": str(rows)}}
    domains = {name: domain(**data, specialist=str(tmp_path / name), eval=data) for name in ("alike", "other")}
    fields: dict[str, Any] = {"model": str(tmp_path / "base"), "sft": {**data, "max_steps": 5}, "domains": domains}
    student = {"servers": {"student": {"max_model_len": 64}}}
    with pytest.raises(ConfigErrors) as told:
        preflight_stages(plan(**fields, merge=student))
    (line,) = told.value.lines
    assert line.startswith(f"domains.other.specialist: {other} has another vocabulary than {tmp_path / 'base'}: 1 of ")
    assert "'<think>'" in line
