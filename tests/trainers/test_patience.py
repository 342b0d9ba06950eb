"""`eval.patience`: the run ends when held-out accuracy stops rising, also across a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from trainers.algorithms import build_algorithm
from trainers.loop import TrainLoop, TrainResult


def train(
    folder: Path, accuracies: dict[int, float], patience: int, max_steps: int = 12, resume: Path | None = None
) -> TrainResult:
    config = grpo_config(
        output_dir=str(folder),
        max_steps=max_steps,
        save_steps=100,
        logging_steps=100,
        eval={"dataset": {"path": "d.jsonl"}, "every": 2, "patience": patience},
    )
    loop = TrainLoop(
        config,
        build_algorithm(config),
        tiny_policy(config),
        ONE_RANK,
        FakeSource(steps=20),
        evaluate=lambda policy, version: {"eval/accuracy": accuracies[loop.callbacks.state.global_step]},
    )
    return loop.run(resume)


def test_stops_after_evaluations_without_improvement(tmp_path: Path) -> None:
    result = train(tmp_path, {2: 0.1, 4: 0.3, 6: 0.3, 8: 0.2, 10: 0.9}, patience=2)
    assert (result.step, result.stopped) == (8, "callback")
    assert result.checkpoint is not None and result.checkpoint.name == "checkpoint-8"


def test_a_better_accuracy_starts_the_count_again(tmp_path: Path) -> None:
    result = train(tmp_path, {2: 0.1, 4: 0.1, 6: 0.2, 8: 0.2, 10: 0.3, 12: 0.3}, patience=2)
    assert (result.step, result.stopped) == (12, "max_steps")


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    first = train(tmp_path, {2: 0.5, 4: 0.4}, patience=2, max_steps=4)
    assert (first.step, first.stopped) == (4, "max_steps")
    result = train(tmp_path, {6: 0.4, 8: 0.4}, patience=2, resume=first.checkpoint)
    assert (result.step, result.stopped) == (6, "callback")


def test_patience_without_evaluations_is_refused() -> None:
    with pytest.raises(ValidationError, match="set `every`"):
        grpo_config(eval={"dataset": {"path": "d.jsonl"}, "patience": 2})
