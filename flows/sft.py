"""`sft-long-context`: supervised fine-tuning on books, conversations or completions, of any length, without servers."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import SFTRunConfig
from flows.pipeline import run_experiment


@flow(name="sft-long-context", log_prints=True, persist_result=False)
def sft_long_context(config: SFTRunConfig) -> Any:
    """Train a model on recorded sequences, short ones or of a million tokens: lease, train, evaluate, register, release.

    Args:
        config: everything about the run, see docs/config.md.
    """
    return run_experiment(config, "sft-long-context")
