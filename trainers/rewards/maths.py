"""Accuracy of mathematical answers.

    gold, completion ─▶ plain numbers? compared here ─▶ else a worker process with math-verify ─▶ 1, 0 or None

Sympy may run for minutes on one answer and holds the interpreter lock while it does, so it runs in worker processes that are
killed when the time is up.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trainers.errors import ConfigError
from trainers.rewards.text import text_of
from trainers.rewards.workers import WorkerPool

Function = TypeVar("Function", bound=Callable[..., Any])

ITEM_LIMIT_S = 5.0
MAX_WORKERS = 4
_TAIL_CHARS = 2000
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_PLAIN_NUMBER = re.compile(rf"\$?\s*({_NUMBER.pattern})\s*[%.]?")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def choices(*groups: tuple[str, ...]) -> Callable[[Function], Function]:
    """Marks a reward function that needs all columns of one of `groups`, which its signature cannot say."""

    def mark(function: Function) -> Function:
        function.column_choices = groups  # type: ignore[attr-defined]
        return function

    return mark


def _final_answer(text: str) -> str:
    """What follows GSM8K's `####`, else the whole text."""
    return text.rsplit("####", 1)[1].strip() if "####" in text else text


def _plain_number(text: str) -> Decimal | None:
    match = _PLAIN_NUMBER.fullmatch(text.strip())
    return Decimal(match.group(1).replace(",", "")) if match else None


def _equal_numbers(gold: str, answer: str) -> bool | None:
    """Whether a plain number is what the answer states; None: it takes mathematics to say."""
    number = _plain_number(gold)
    if number is None:
        return None
    boxed = _BOXED.findall(answer)
    said = _plain_number(boxed[0] if len(boxed) == 1 and answer.count("\\boxed") == 1 else answer)
    if said is not None:
        return said == number
    # A number is equal to nothing that has neither digits nor commands in it.
    return None if re.search(r"[\d\\$]", answer) else False


@cache
def _workers() -> WorkerPool:
    # -P: the folder of the file must not come before the standard library's modules.
    command = [sys.executable, "-P", str(Path(__file__).with_name("maths_worker.py"))]
    return WorkerPool(command, min(MAX_WORKERS, os.cpu_count() or 1))


def _equal(prediction: str, gold: str, limit_s: float) -> float | None:
    """1 or 0; None: the gold answer cannot be parsed."""
    gold, answer = _final_answer(gold).strip(), _final_answer(prediction[-_TAIL_CHARS:]).strip()
    if (equal := _equal_numbers(gold, answer)) is not None:
        return float(equal)
    replies = _workers().ask({"gold": gold, "answer": answer, "limit_s": limit_s}, replies=2, limit_s=limit_s)
    if not replies or not replies[0]["gold"]:
        return None
    return float(len(replies) == 2 and replies[1]["equal"])


@choices(("solution",), ("answer",))
def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    limit_s: float = ITEM_LIMIT_S,
    **kwargs: Any,
) -> list[float | None]:
    """1 where the completion's final answer is mathematically equal to column `solution` (or `answer`), else 0; by math-verify.

    Understands GSM8K's `#### 42` in either, and `\\boxed{…}`. None where the reference cannot be parsed. An answer that takes
    more than `limit_s` seconds to read or compare is worth 0.
    """
    golds = solution if solution is not None else answer
    if golds is None:
        raise ConfigError("accuracy_reward needs a dataset column `solution` or `answer` with the reference answers")
    return [_equal(text_of(completion), str(gold), limit_s) for completion, gold in zip(completions, golds, strict=True)]
