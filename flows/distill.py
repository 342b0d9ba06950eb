"""`distill-mopd`: a student learns, on what it generates itself, from one teacher, or each prompt from its own of many."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import DistillationRunConfig
from flows.pipeline import run_experiment


@flow(name="distill-mopd", log_prints=True, persist_result=False)
def distill_mopd(config: DistillationRunConfig) -> Any:
    """Distil teachers into a student, on the student's own completions: lease, serve both, train, evaluate, register, release.

    Args:
        config: everything about the run, see docs/config.md.
    """
    return run_experiment(config, "distill-mopd")
