"""Speed of the trainer core alone: packed rows of random tokens through the real loop, GRPO loss, optimizer included.

    python -m benchmarks.trainer_step [--shape NAME] [--steps N] [--json]

Rows come from memory, so nothing waits for generation; no weight sync and no checkpoint is in the figures. Under torchrun every
rank takes part and rank 0 prints. The first steps warm up and are left out; medians of the others are printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.shapes import SHAPES, qwen3_config
from trainers.algorithms import build_algorithm
from trainers.config import GRPOConfig
from trainers.distributed import Ranks, init_distributed, shutdown_distributed
from trainers.loop import TrainLoop
from trainers.model import build_policy
from trainers.packing import pack_step
from trainers.step_source import STATE_FILE, SourceInfo
from trainers.types import PackedRow, Sample, Step, StepHead, StepPlan

# Model, tokens per row and per sample.
WORK: dict[str, tuple[tuple[int, ...], int, int]] = {
    "tiny": ((4, 128, 384, 4, 2, 32, 64), 2048, 32),
    "qwen3-0.6b": (SHAPES["0.6b"], 16384, 1024),
    "qwen3-4b": (SHAPES["4b"], 16384, 1024),
}
POSITIONS = 32768


def build_model(shape: tuple[int, ...], attn: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        qwen3_config(shape, POSITIONS), attn_implementation=attn, dtype=torch.float32
    )


@dataclass
class MemorySource:
    """Serves `steps` steps whose rows are full of equal samples, `prompt_share` of each not trained."""

    steps: int
    vocab: int
    row_tokens: int
    sample_tokens: int
    microbatches: int
    ranks: int = 1
    prompt_share: float = 0.5  # of a sample, the part that is not trained
    done: list[int] = field(default_factory=list)
    rows_address: str | None = None
    passes: float = 0.0
    held: dict[int, Step] = field(default_factory=dict)

    def start(self, *, resume_dir: Path | None, version: int, world_size: int, resume_step: int) -> SourceInfo:
        self.ranks = world_size
        return SourceInfo(1, "memory", self.row_tokens, self.sample_tokens, self.vocab)

    def request_step(self, index: int, train_version: int) -> None:
        """Steps are made when they are taken."""

    def ready(self, index: int, train_version: int, timeout_s: float) -> bool:
        return True

    def next_step(self, index: int, train_version: int) -> StepHead | None:
        if index > self.steps:
            return None
        rng = np.random.default_rng(index)
        per_row = self.row_tokens // self.sample_tokens
        count = per_row * self.ranks * self.microbatches
        mask = np.arange(self.sample_tokens) >= max(1, int(self.prompt_share * self.sample_tokens))
        logprobs = np.where(mask, -np.log(self.vocab), 0).astype(np.float32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        samples = [
            Sample(f"0:{i}", tokens.astype(np.int32), mask, logprobs, (-1.0) ** i, 0, versions)
            for i, tokens in enumerate(rng.integers(0, self.vocab, (count, len(mask))))
        ]
        ids = iter(range(count))
        rows = [[[next(ids) for _ in range(per_row)] for _ in range(self.ranks)] for _ in range(self.microbatches)]
        self.held[index] = pack_step(index, StepPlan(rows), samples, {})
        return StepHead(index, self.held[index].totals, {})

    def fetch(self, index: int, rank: int) -> list[PackedRow]:
        return [microbatch[rank] for microbatch in self.held[index].rows]

    def check(self) -> None:
        """Nothing ends it."""

    def committed(self, index: int) -> None:
        self.done.append(index)
        del self.held[index]

    def synced(self, version: int, served_as: str | None = None) -> None:
        """Nothing is generated."""

    def servers(self, servers: Any) -> None:
        """Nothing is generated."""

    def snapshot(self, directory: Path) -> dict[str, Any]:
        (directory / STATE_FILE).write_text("{}")
        return {}

    def drain_rollouts(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        """Nothing was started."""


class Recorder:
    """Keeps every step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def started(self, info: SourceInfo, resume_step: int) -> None:
        """Every run starts anew."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def commit(self, step: int) -> None:
        """Only the figures count here."""

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """There are none."""

    def bottleneck(self, step: int, text: str) -> None:
        """Nothing is waited for."""

    def checkpoint(self, step: int, path: str) -> None:
        """The run's last state is thrown away."""

    def artifact(self, path: Path, name: str) -> None:
        """No file is looked at."""


def measure(shape_name: str, steps: int, warmup: int, microbatches: int, ranks: Ranks, output_dir: str) -> dict[str, Any]:
    """Train `warmup + steps` steps; medians over the last `steps` of them."""
    from trainers import attention
    from trainers.model import compute_dtype

    shape, row_tokens, sample_tokens = WORK[shape_name]
    fields = {
        "model": shape_name,
        "dataset": {"path": "memory"},
        "output_dir": output_dir,
        "max_steps": warmup + steps,
        "gradient_accumulation_steps": microbatches,
        "learning_rate": 1e-5,
    }
    config = GRPOConfig.model_validate(fields)
    backend = attention.install(ranks.device, compute_dtype(config, ranks.device) or torch.float32)
    model = build_model(shape, attention.NAME)
    policy = build_policy(model, config, ranks)
    recorder = Recorder()
    source = MemorySource(warmup + steps, shape[-1], row_tokens, sample_tokens, microbatches) if ranks.is_main else None
    TrainLoop(config, build_algorithm(config), policy, ranks, source, sink=recorder).run()
    kept = recorder.steps[warmup:]
    names = sorted({name for values in kept for name in values if name.startswith("perf/")})
    medians = {name: statistics.median(values[name] for values in kept if name in values) for name in names}
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "benchmark": "trainer_step",
        "shape": shape_name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "row_tokens": row_tokens,
        "sample_tokens": sample_tokens,
        "microbatches": microbatches,
        "ranks": ranks.world_size,
        "steps": steps,
        "device": device,
        "attention": backend.name,
        "attention_reason": backend.reason,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(WORK), default="qwen3-0.6b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, not counted")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = parser.parse_args()
    ranks = init_distributed(needs_mesh=torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args.shape, args.steps, args.warmup, args.microbatches, ranks, folder)
    if ranks.is_main:
        print(json.dumps(result) if args.json else "\n".join(f"{name:32} {value}" for name, value in result.items()))
    shutdown_distributed()


if __name__ == "__main__":
    main()
