"""Rewards that look at the completion's text alone, or compare it with a column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of its assistant messages."""
    if isinstance(completion, str):
        return completion
    return "".join(
        str(message.get("content") or "") for message in completion if message.get("role", "assistant") == "assistant"
    )


def exact_match_reward(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 where the stripped completion is exactly column `answer`, else 0."""
    return [
        float(text_of(completion).strip() == str(gold).strip()) for completion, gold in zip(completions, answer, strict=True)
    ]


def format_reward(completions: Sequence[Any], pattern: str = r"####\s*[-+]?[\d.,]+", **kwargs: Any) -> list[float]:
    """1 where the regular expression `pattern` is found in the completion, else 0. A dot matches line ends too."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(bool(compiled.search(text_of(completion)))) for completion in completions]


def repetition_penalty_reward(
    completions: Sequence[Any], ngram_words: int = 3, max_penalty: float = 1.0, **kwargs: Any
) -> list[float]:
    """−max_penalty · (1 − distinct / all), counted over the completion's n-grams of words, case ignored.

    0 where no n-gram repeats or the completion has fewer than n words, towards −max_penalty for a text that repeats itself
    without end (n-gram penalty of arXiv:2502.03373, given to the whole completion).
    """
    return [-max_penalty * _repeated_share(text_of(completion).lower().split(), ngram_words) for completion in completions]


def _repeated_share(words: Sequence[str], size: int) -> float:
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
