"""Other ways to one model than distillation (`benchmarks.merging`): the mean of weights, and one run on all domains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.merging import average_weights, mixed_config, table
from flows.recipe_config import RecipeConfig
from flows.recipe_plan import Plan
from tests.flows.test_recipe_config import recipe
from tests.support.tiny_model import build_tiny_model
from trainers.errors import ConfigError


def plan(folder: Path, **fields) -> Plan:
    for name, rows in (("add", 4), ("order", 2)):
        lines = [json.dumps({"prompt": f"{name}{index}", "answer": str(index)}) + "\n" for index in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    reward = ["trainers.rewards:exact_match_reward"]
    domains = {
        name: {"dataset": {"path": str(folder / f"{name}.jsonl")}, "reward_funcs": reward, **fields.get(name, {})}
        for name in ("add", "order")
    }
    domains["order"]["overrides"] = {"max_steps": 9, "max_completion_length": 20}
    return Plan(RecipeConfig.model_validate(recipe(domains=domains)))


def test_every_weight_is_the_mean(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [build_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    out = average_weights([str(model) for model in models], tmp_path / "mean")
    first, second, mean = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (*models, out))
    assert mean.keys() == first.keys() and any(not first[name].equal(second[name]) for name in first)
    for name, value in mean.items():
        assert value.equal(((first[name].double() + second[name].double()) / 2).to(value.dtype)), name
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(models[0]).get_vocab()


def test_one_run_on_all_domains_has_the_specialists_steps_together_and_the_students_order(tmp_path: Path):
    config = mixed_config(plan(tmp_path), "/sft", None, tmp_path)
    assert (config.name, config.model, config.max_steps, config.max_completion_length) == ("r-mixed", "/sft", 7 + 9, 20)
    rows = [json.loads(line) for line in Path(config.dataset.path).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["add0", "order0", "add1", "add2", "order1", "add3"]
    assert all(row["answer"] == row["prompt"][-1] for row in rows)  # each with its own columns
    assert mixed_config(plan(tmp_path), "/sft", 5, tmp_path).max_steps == 5


def test_domains_that_one_run_cannot_tell_apart_are_refused(tmp_path: Path):
    other = {"order": {"reward_funcs": ["trainers.rewards:accuracy_reward"]}}
    with pytest.raises(ConfigError, match="different reward functions"):
        mixed_config(plan(tmp_path, **other), "/sft", None, tmp_path)
    spoken = {"order": {"dataset": {"path": str(tmp_path / "order.jsonl"), "system_prompt": "Sort."}}}
    with pytest.raises(ConfigError, match="different forms"):
        mixed_config(plan(tmp_path, **spoken), "/sft", None, tmp_path)


def test_the_table_has_a_row_per_model_and_what_is_kept_of_the_gain():
    found = {
        "accuracy": {"sft": {"add": 0.5, "order": 0.4}, "merged": {"add": 0.9, "order": 0.8}},
        "steps": {"sft": 0, "merged": 50},
        "kept": {"merged": {"add": 0.95, "order": None}},
    }
    assert table(found, ["add", "order"]).splitlines()[2:] == [
        "| sft | 0 | 0.500 | 0.400 |  |",
        "| merged | 50 | 0.900 | 0.800 | 95% |",
    ]
