"""Reward functions and how they are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainers.config import CallableSpec
from trainers.errors import ConfigError
from trainers.rewards import accuracy_reward, exact_match_reward, format_reward, load_callable, reward_name


def said(*texts: str) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("Half of it is 21.\n#### 42", "because\n#### 42", 1.0),
        ("#### 1,024", "#### 1024", 1.0),
        ("#### 41", "#### 42", 0.0),
        ("I do not know", "#### 42", 0.0),
        ("The answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("so \\boxed{x^2+1}", "$1+x^2$", 1.0),
        ("\\boxed{9^{9^{9^9}}}", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_accuracy(completion: str, gold: str, expected: float) -> None:
    assert accuracy_reward(completions=said(completion), solution=[gold]) == [expected]
    assert accuracy_reward(completions=[completion], answer=[gold]) == [expected]


def test_accuracy_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="`solution` or `answer`"):
        accuracy_reward(completions=said("1"))


def test_exact_match_and_format() -> None:
    assert exact_match_reward(completions=said(" 12\n", "13"), answer=["12", 12]) == [1.0, 0.0]
    assert format_reward(completions=said("x #### 5", "5")) == [1.0, 0.0]
    assert format_reward(completions=said("<b>5</b>"), pattern="<b>.*</b>") == [1.0]


def test_callables_are_loaded_with_their_arguments(tmp_path: Path) -> None:
    bound = load_callable(CallableSpec(path="trainers.rewards:format_reward", kwargs={"pattern": "^a"}))
    assert bound(completions=["ab", "ba"]) == [1.0, 0.0] and reward_name(bound) == "format_reward"
    file = tmp_path / "mine.py"
    file.write_text(
        "class Judge:\n    def __init__(self, k): self.k = k\n    def __call__(self, completions): return [self.k]\n"
    )
    judge = load_callable(CallableSpec(path=f"{file}:Judge", kwargs={"k": 3}))
    assert judge(completions=["x"]) == [3] and reward_name(judge) == "Judge"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "no import path"),
        ("no.such.module:f", "cannot import"),
        ("trainers.rewards:acuracy", "has no `acuracy`; it has: .*accuracy_reward"),
        ("missing.py:f", "there is no file"),
        ("trainers.rewards:__doc__", "cannot be called"),
    ],
)
def test_wrong_paths_say_what_is_there(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callable(CallableSpec(path=path))
