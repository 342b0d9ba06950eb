"""Small policies on CPU for tests of the trainer core."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.tiny_model import build_model
from trainers import attention
from trainers.config import DistillationConfig, GRPOConfig, TrainerConfig
from trainers.distributed import Ranks
from trainers.model import Policy, build_policy

ONE_RANK = Ranks(0, 1, 0, torch.device("cpu"), None, None)


def grpo_config(**fields: Any) -> GRPOConfig:
    defaults = {"model": "m", "dataset": {"path": "d.jsonl"}, "learning_rate": 1e-2, "gradient_accumulation_steps": 2}
    return GRPOConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def distillation_config(**fields: Any) -> DistillationConfig:
    """Of two teachers, `a` and `b`."""
    urls = {name: f"http://localhost:{port}" for name, port in (("a", 8001), ("b", 8002))}
    defaults = {"model": "m", "dataset": {"path": "d.jsonl"}, "learning_rate": 1e-2, "gradient_accumulation_steps": 2}
    return DistillationConfig(**{**defaults, "teacher_server_urls": urls, **fields})  # type: ignore[arg-type]


def tiny_policy(
    config: TrainerConfig | None = None,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks = ONE_RANK,
    seed: int = 0,
    tied: bool = True,
) -> Policy:
    """A 2-layer model with grouped-query heads, ready to train."""
    attention.install(ranks.device, dtype, log=False)
    model = build_model(seed, tied).to(dtype)
    model.set_attn_implementation(attention.NAME)
    return build_policy(model, config or grpo_config(), ranks)
