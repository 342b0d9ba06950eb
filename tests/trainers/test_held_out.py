"""Evaluation in mid-run leaves the trained model as it was."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.policies import ONE_RANK
from tests.support.tiny_model import build_tiny_model
from trainers import attention
from trainers.config import SFTConfig
from trainers.data import load_tokenizer
from trainers.held_out import HeldOut
from trainers.model import build_policy, load_model


def test_training_goes_on_as_if_there_had_been_no_evaluation(tmp_path: Path) -> None:
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) + "\n" for i in range(3)))
    config = SFTConfig.model_validate(
        {
            "model": str(build_tiny_model(tmp_path / "model")),
            "dataset": {"path": str(rows)},
            "eval": {
                "dataset": {"path": str(rows)},
                "reward_func": "trainers.rewards:exact_match_reward",
                "max_completion_length": 4,
            },
        }
    )
    attention.install(torch.device("cpu"), torch.float32, log=False)
    policy = build_policy(load_model(config), config, ONE_RANK)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    state = torch.get_rng_state()
    metrics = HeldOut(config, ONE_RANK, load_tokenizer(config))(policy, 0)
    assert 0.0 <= metrics["eval/accuracy"] <= 1.0
    # Every layer looks its attention up in the config at each forward.
    assert policy.model.config._attn_implementation == attention.NAME
    assert policy.model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
