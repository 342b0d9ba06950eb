"""Reward functions that tests name by import path, because they run in the rollout process."""

from __future__ import annotations

import os
import time
from typing import Any


def half(completions: list[Any], **kwargs: Any) -> list[float]:
    """0 and 1 in turn: every group has variance."""
    return [float(i % 2) for i in range(len(completions))]


def slow(completions: list[Any], **kwargs: Any) -> list[float]:
    time.sleep(2)
    return half(completions)


def hold_the_interpreter(completions: list[Any], **kwargs: Any) -> list[float]:
    """Never lets go of the GIL: a regular expression that backtracks for ever."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")
    return []


def die(completions: list[Any], **kwargs: Any) -> list[float]:
    os._exit(7)
