"""`oom_retry`: an attempt that ran out of memory is tried again once, with rows half as long.

    trainer: memory ─▶ smaller rows, noted as the stage `oom_retry` ─▶ every later attempt, whoever resumes the run

Rows are half as long and twice as many, so that a step trains as much as before.
"""

from __future__ import annotations

from typing import Any

STAGE = "oom_retry"  # of a run in the registry


def longest_sequence(fields: dict[str, Any], servers: list[dict[str, Any]]) -> int | None:
    """What `token_budget` is where none is set: tokens of the longest sequence that the run may make; None: not known."""
    lengths = [row["max_model_len"] for row in servers if isinstance(row.get("max_model_len"), int)]
    return fields.get("max_length") or min(lengths, default=None)


def smaller(fields: dict[str, Any], longest: int | None) -> dict[str, int] | None:
    """What to change of the trainer's fields; None: its rows cannot be halved."""
    if fields.get("packing") is False:
        return None  # a row is one sequence
    name, value = "token_budget", fields.get("token_budget")
    if value is None:
        value = longest
    elif value <= 0:
        name, value = "per_device_train_batch_size", fields.get("per_device_train_batch_size", 1)
    if value is None or value < 2:
        return None
    return {name: value // 2, "gradient_accumulation_steps": 2 * fields.get("gradient_accumulation_steps", 1)}


def describe(change: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items())
