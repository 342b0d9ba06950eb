"""Loopwright's trainer core. Public names are loaded on first use, so that importing the package costs no torch."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AsyncGRPOTrainer": "trainers.grpo_trainer",
    "AsyncGRPOConfig": "trainers.grpo_trainer",
    "AsyncRolloutLoop": "trainers.rollouts.loop",
    "Rollout": "trainers.types",
    "RolloutGroup": "trainers.types",
    "TurnRecord": "trainers.types",
}
__all__ = list(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'trainers' has no attribute {name!r}")
