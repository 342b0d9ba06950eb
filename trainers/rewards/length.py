"""Rewards for how long a completion is, in sampled tokens (`completion_ids`, all turns of a conversation together)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainers.errors import ConfigError
from trainers.rewards.maths import accuracy_reward, choices


def length_reward(
    completion_ids: Sequence[Sequence[int]], target_tokens: int, weight_per_token: float = 0.0003, **kwargs: Any
) -> list[float]:
    """−weight_per_token · |L − target_tokens|, at least −1, for a completion of L tokens.

    The length term of L1 (LCPO-Exact, arXiv:2503.04697), whose coefficient is the default; add it to a correctness reward.
    """
    return [max(-1.0, -weight_per_token * abs(len(ids) - target_tokens)) for ids in completion_ids]


def overlong_punishment(completion_ids: Sequence[Sequence[int]], max_length: int, buffer: int, **kwargs: Any) -> list[float]:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), for a completion of L tokens.

    0 for L ≤ max_length − buffer; (max_length − buffer − L) / buffer up to max_length; −1 beyond. `max_length` is the paper's
    L_max, `buffer` its L_cache. Generation must be allowed to go on longer than max_length for the last case to occur.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"overlong_punishment: buffer is {buffer} with max_length {max_length}: the buffer is the part of max_length in "
            "which the punishment grows, so write one in 1 … max_length"
        )
    free = max_length - buffer
    return [min(0.0, max(-1.0, (free - len(ids)) / buffer)) for ids in completion_ids]


@choices(("solution",), ("answer",))
def cosine_length_reward(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int,
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    correct: Sequence[float] = (2.0, 1.0),
    wrong: Sequence[float] = (-10.0, 0.0),
    exceeded: float = -10.0,
    **kwargs: Any,
) -> list[float | None]:
    """Accuracy with its value moved along a half cosine by length (arXiv:2502.03373, whose values are the defaults).

    For L < max_tokens: r_end + (r_start − r_end) · (1 + cos(π · L / max_tokens)) / 2, with (r_start, r_end) = `correct` or
    `wrong`, the values at lengths 0 and max_tokens. `exceeded` for L ≥ max_tokens, right or wrong. Short right answers earn
    more than long ones, and wrong ones lose less the longer they tried. Correctness is `accuracy_reward`'s, None included.
    """
    rewards: list[float | None] = []
    judged = accuracy_reward(completions=completions, solution=solution, answer=answer)
    for right, ids in zip(judged, completion_ids, strict=True):
        if right is None or len(ids) >= max_tokens:
            rewards.append(None if right is None else exceeded)
            continue
        start, end = correct if right else wrong
        rewards.append(end + (start - end) * (1 + math.cos(math.pi * len(ids) / max_tokens)) / 2)
    return rewards
