"""`train-sft`: supervised fine-tuning on recorded completions, by the same tasks as GRPO but without servers."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import SFTRunConfig
from flows.pipeline import run_experiment


@flow(name="train-sft", log_prints=True, persist_result=False)
def train_sft(config: SFTRunConfig) -> Any:
    """Train a model on recorded completions: lease, train, evaluate, register, release.

    Args:
        config: everything about the run, see docs/config.md.
    """
    return run_experiment(config, "train-sft")
