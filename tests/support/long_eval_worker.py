"""Evaluates long sequences on one rank or several: `torchrun … long_eval_worker.py FOLDER`; the metrics are left in FOLDER.

FOLDER/held has the held-out books. Two ranks do it twice: each with sequences of its own, then sharing each sequence.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerControl, TrainerState

from tests.support.policies import tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.config import SFTConfig
from trainers.distributed import Ranks, init_distributed, share_rows, shutdown_distributed
from trainers.long_eval import LongEvaluation


class Keeping:
    """A sink that keeps the newest values."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    def artifact(self, path: Path, name: str) -> None:
        """The files stay where they are."""


def evaluate(folder: Path, ranks: Ranks, name: str) -> dict[str, float]:
    fields: dict[str, Any] = {
        "max_length": 256,
        "output_dir": str(folder / name),
        "packing": False,
        "bf16": False,
        "books": {"cache_dir": str(folder / "cache")},
        "long_eval": {
            "books": {"path": str(folder / "held"), "sequences": 5, "bins": 4},
            "needle": {"lengths": [200, 256], "depths": [0.5]},
        },
    }
    config: Any = SFTConfig(model="m", dataset={"path": "d"}, **fields)  # type: ignore[arg-type]
    policy, sink = tiny_policy(config, torch.float64, ranks), Keeping()
    LongEvaluation(config, ranks, policy, build_tokenizer(), sink).on_train_begin(None, TrainerState(), TrainerControl())  # type: ignore[arg-type]
    if ranks.world_size > 1:
        assert all(isinstance(p, DTensor) for p in policy.parameters()), "parameters are not sharded, or were left gathered"
    return sink.metrics


def run(folder: Path) -> dict[str, dict[str, float]]:
    ranks = init_distributed()
    found = {"own": evaluate(folder, ranks, "own")}
    if ranks.world_size > 1:
        shared = dataclasses.replace(ranks, sequence=share_rows(ranks.device, ranks.world_size, 2, 1))
        found["shared"] = evaluate(folder, shared, "shared")
    if ranks.is_main:
        (folder / f"metrics-{ranks.world_size}.json").write_text(json.dumps(found))
    shutdown_distributed()
    return found


if __name__ == "__main__":
    run(Path(sys.argv[1]))
