"""The evaluate stage under the retry policy, with a real evaluation on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import SFTRunConfig
from flows.evaluation import evaluate_model
from flows.experiment import Experiment
from flows.failures import RunFailed
from flows.runs import open_run
from flows.training import NoServers
from infra.registry import Registry
from tests.support.tiny_model import build_tiny_model


class GoneServer(NoServers):
    """A server that is found dead."""

    def death(self) -> str | None:
        return "vLLM server student died: killed by SIGKILL"


def experiment(folder: Path, retries: int) -> Experiment:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "completion": "2", "answer": "2"}) + "\n" for i in range(3)))
    fields: dict[str, Any] = {
        "name": "evaluated",
        "model": str(build_tiny_model(folder / "model")),
        "dataset": {"path": str(rows)},
        "eval": {
            "dataset": {"path": str(rows)},
            "reward_func": "trainers.rewards:exact_match_reward",
            "max_completion_length": 2,
        },
        "max_length": 64,
        "storage": {"uri": str(folder / "runs")},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
        "retry": {"infrastructure": retries, "backoff_s": 0},
    }
    config = SFTRunConfig.model_validate(fields)
    registry = Registry(folder / "registry.db")
    run, _ = open_run(registry, config, "sft-long-context", "flow-run")
    made = Experiment(registry, config, run)
    made.servers = GoneServer()
    return made


def test_an_evaluation_whose_server_died_is_made_again_without_it(tmp_path: Path) -> None:
    made = experiment(tmp_path, retries=1)
    try:
        scores = evaluate_model(made, made.config.model, 0, served=True)
    finally:
        made.release()
    assert scores["scored"] == 3 and 0 <= scores["accuracy"] <= 1


def test_without_tries_left_the_run_fails_with_the_servers_end(tmp_path: Path) -> None:
    made = experiment(tmp_path, retries=0)
    try:
        with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
            evaluate_model(made, made.config.model, 0, served=True)
    finally:
        made.release()
    assert caught.value.failure == "infrastructure"
