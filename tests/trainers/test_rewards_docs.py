"""docs/rewards.md: every built-in reward is on the page with its columns and kwargs, and its examples load."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

from trainers import rewards
from trainers.config_parts import CallableSpec
from trainers.rewards import load_callable, reward_name

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
HELPERS = {"RewardFunc", "load_callable", "load_object", "reward_name", "text_of"}
BUILT_IN = sorted(set(rewards.__all__) - HELPERS)
GIVEN = {"completions", "completion_ids", "prompts", "kwargs", "self"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_reward_has_its_row_with_columns_and_kwargs(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    parameters = set(inspect.signature(getattr(rewards, name)).parameters) - GIVEN
    described = PAGE[PAGE.index("### Reward models") :] if name == "RewardModel" else row
    assert parameters <= set(re.findall(r"`(\w+)`", described)), "a parameter is not on the page"


def test_the_examples_of_the_page_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL):
        if language == "python":
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)
    names = []
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        config = yaml.safe_load(block)
        functions = [load_callable(CallableSpec.model_validate(spec)) for spec in config["reward_funcs"]]
        for function in functions:
            inspect.signature(function).bind_partial(prompts=[], completions=[], completion_ids=[])
        names += [reward_name(function) for function in functions]
    assert {"accuracy_reward", "code_reward", "overlong_punishment", "helpful", "short", "Judge"} <= set(names)
    pattern = re.search(r"pattern: '(.*)'", PAGE)
    assert pattern is not None and re.search(pattern[1], "<think>x</think>\n\\boxed{4}")
