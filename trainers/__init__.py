"""Loopwright's trainer core. Public names are loaded on first use, so that importing the package costs no torch."""

from __future__ import annotations

import importlib
import os
from typing import Any

# Trainer and CPU server share the cores. OpenMP threads that spin while they wait keep the other side's from running: with two
# threads each on two cores, work took 35 times as long. Read when torch is loaded, so it is set before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_EXPORTS = {
    "AsyncGRPOTrainer": "trainers.grpo_trainer",
    "AsyncGRPOConfig": "trainers.grpo_trainer",
    "AsyncDistillationTrainer": "trainers.distillation_trainer",
    "AsyncDistillationConfig": "trainers.distillation_trainer",
    "LongContextSFTTrainer": "trainers.sft_trainer",
    "LongContextSFTConfig": "trainers.sft_trainer",
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
