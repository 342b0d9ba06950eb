"""`train-grpo`: asynchronous GRPO with a vLLM server of its own (or one given by URL)."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import GRPORunConfig
from flows.pipeline import run_experiment


@flow(name="train-grpo", log_prints=True, persist_result=False)
def train_grpo(config: GRPORunConfig) -> Any:
    """Train a model with GRPO against reward functions: lease, serve, train, evaluate, register, release.

    Args:
        config: everything about the run, see docs/config.md.
    """
    return run_experiment(config, "train-grpo")
