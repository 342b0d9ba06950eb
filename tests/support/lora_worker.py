"""One rank of the adapters' distributed test: `torchrun … lora_worker.py FOLDER`. What it computes is left in FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.fake_adapters import FakeAdapterServer
from tests.support.fake_source import FakeSource
from tests.support.policies import grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers import lora
from trainers.algorithms.grpo import GRPO
from trainers.callbacks import PrintSink
from trainers.checkpoint import latest_whole
from trainers.distributed import Ranks, init_distributed, shutdown_distributed
from trainers.loop import TrainLoop
from trainers.model import gathered_parameters
from trainers.weight_sync.sync import ServerSync

VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "dora": {"use_dora": True}}


def train(ranks: Ranks, folder: Path, name: str, until: int) -> None:
    """Go on from the newest checkpoint, if any; adapters are also sent to servers in memory."""
    config = grpo_config(
        output_dir=str(folder / name),
        max_steps=4,
        save_steps=2,
        bf16=False,
        weight_check_steps=1,
        optim="sgd",  # Adam would divide rounding in near-zero gradients by itself
        learning_rate=0.5,
        peft={"r": 4, **VARIANTS[name.split("-")[0]]},
    )
    policy = tiny_policy(config, torch.float32, ranks)
    if ranks.world_size > 1:
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "parameters are not sharded"
    source = FakeSource(steps=until) if ranks.is_main else None
    if source is not None:
        source.micro = 2
    able = config.adapter_serving is not None
    sync = ServerSync(config, ranks, build_tokenizer(), [FakeAdapterServer()]) if able else None
    loop = TrainLoop(config, GRPO(config), policy, ranks, source, sink=PrintSink(), weight_sync=sync)
    loop.run(latest_whole(config.output_dir))
    adapter = lora.adapter_state(policy.model, keep=True)
    merged = dict(gathered_parameters(policy.model, None, keep=True))
    if ranks.is_main:
        losses = [entry["loss"] for entry in loop.callbacks.state.log_history]
        torch.save({"adapter": adapter, "merged": merged}, folder / f"{name}-{until}-{ranks.world_size}.pt")
        (folder / f"{name}-{until}-{ranks.world_size}.json").write_text(json.dumps(losses))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = init_distributed(120)
    for variant in VARIANTS:
        train(ranks, folder, f"{variant}-straight-{ranks.world_size}", 4)
    train(ranks, folder, f"plain-halves-{ranks.world_size}", 2)
    train(ranks, folder, f"plain-halves-{ranks.world_size}", 4)
    shutdown_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
