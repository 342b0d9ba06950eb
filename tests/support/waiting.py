"""Waiting for something another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 120.0, what: str = "", every_s: float = 0.02) -> T:
    """Polls until `condition()` is truthy and returns its value; AssertionError after a limit that only a hang reaches."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come true within {timeout_s:.0f} s"
        time.sleep(every_s)
    return value
