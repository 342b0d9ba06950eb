"""A deterministic `StepSource`: step i of seed s is always the same samples, whatever the number of ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainers.packing import pack_step
from trainers.step_source import STATE_FILE, SourceInfo
from trainers.types import PackedRow, Sample, Step, StepHead, StepPlan


def make_samples(seed: int, step: int, count: int = 5, vocab: int = 64, longest: int = 12, top_k: int = 3) -> list[Sample]:
    """`count` samples of ragged lengths with advantages, sampler and top logprobs near a uniform policy's."""
    rng, tops = np.random.default_rng([seed, step]), np.random.default_rng([seed, step, 1])
    samples = []
    for i in range(count):
        length = int(rng.integers(3, longest + 1))
        prompt = int(rng.integers(1, length - 1))
        mask = np.arange(length) >= prompt
        logprobs = np.where(mask, -np.log(vocab) + rng.normal(0, 0.3, length), 0).astype(np.float32)
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        sample = Sample(f"0:{step}.{i}", tokens, mask, logprobs, float(rng.normal()), 0, versions)
        sample.top_ids = np.stack([tops.permutation(vocab)[:top_k] for _ in range(mask.sum())]).astype(np.int32)
        spread = tops.normal(0, 0.3, sample.top_ids.shape)
        sample.top_logprobs = -np.sort(np.log(vocab) + spread, 1).astype(np.float32)
        samples.append(sample)
    return samples


def taught(samples: list[Sample], seed: int, teachers: tuple[str, ...], vocab: int = 64, top_k: int = 3) -> list[Sample]:
    """`samples`, scored by `teachers` in turn; `top_k` 0: their tops stay the sampler's."""
    rng = np.random.default_rng(seed)
    for i, sample in enumerate(samples):
        targets = sample.token_ids[sample.loss_mask][:, None]
        scores = rng.normal(0, 1.5, (len(targets), vocab))
        logprobs = (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)
        sample.teacher, sample.teacher_logprobs = teachers[i % len(teachers)], np.take_along_axis(logprobs, targets, 1)[:, 0]
        if top_k:
            likeliest = np.argsort(-logprobs, 1)[:, :top_k].astype(np.int32)
            realised = likeliest == targets
            sample.top_ids = np.where(realised, np.int32(-1), likeliest)
            sample.top_logprobs = np.where(realised, np.float32(-np.inf), np.take_along_axis(logprobs, likeliest, 1))
    return samples


def spread(count: int, micro: int, ranks: int) -> StepPlan:
    """Samples dealt over [micro][rank] in order; the last cells may stay empty."""
    rows: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(micro)]
    cells = [cell for microbatch in rows for cell in microbatch]
    per_cell = -(-count // len(cells))
    for i in range(count):
        cells[i // per_cell].append(i)
    return StepPlan(rows)


@dataclass
class FakeSource:
    """Serves `steps` steps, then None. `calls` records what the loop did, in order."""

    steps: int = 6
    micro: int = 2
    samples_per_step: int = 5
    seed: int = 0
    vocab: int = 64
    fail_at: int | None = None  # step whose `next_step` raises
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    done: int = 0
    closed: bool = False
    ranks: int = 1
    open_request: int | None = None
    not_ready: int = 0  # how often `ready` says no before it says yes for good
    rows_address: str | None = None
    passes: float = 0.0
    held: dict[int, Step] = field(default_factory=dict)
    teachers: tuple[str, ...] = ()

    def start(self, *, resume_dir: Path | None, version: int, world_size: int, resume_step: int) -> SourceInfo:
        self.ranks = world_size
        if resume_dir is not None:
            self.done = json.loads((resume_dir / STATE_FILE).read_text())["done"]
            assert self.done == resume_step, f"ledger says {self.done}, loop says {resume_step}"
        self.calls.append(("start", version, resume_step))
        return SourceInfo(prompts=10, fingerprint="f", token_budget=64, max_sequence_tokens=64, vocab_size=self.vocab)

    def request_step(self, index: int, train_version: int) -> None:
        assert self.open_request is None, f"step {self.open_request} is still open"
        self.open_request = index
        self.calls.append(("request", index, train_version))

    def ready(self, index: int, train_version: int, timeout_s: float) -> bool:
        self.not_ready -= 1
        return self.not_ready < 0

    def next_step(self, index: int, train_version: int) -> StepHead | None:
        self.calls.append(("next", index, train_version))
        self.open_request = None
        if self.fail_at == index:
            from trainers.errors import RolloutProcessDied

            raise RolloutProcessDied("killed by SIGKILL")
        if index > self.steps:
            self.passes = 1.0
            return None
        self.passes = index / 10
        samples = self.samples(index)
        plan = spread(len(samples), self.micro, self.ranks)
        step = pack_step(index, plan, samples, {"epoch": (index, 10.0)}, self.teachers)
        self.held[index] = step
        return StepHead(step.index, step.totals, step.metrics)

    def samples(self, index: int) -> list[Sample]:
        return make_samples(self.seed, index, self.samples_per_step, self.vocab)

    def fetch(self, index: int, rank: int) -> list[PackedRow]:
        return [microbatch[rank] for microbatch in self.held[index].rows]

    def check(self) -> None:
        """Only `next_step` fails."""

    def committed(self, index: int) -> None:
        assert index == self.done + 1, f"step {index} committed after {self.done}"
        self.done = index
        del self.held[index]
        self.calls.append(("committed", index))

    def synced(self, version: int, served_as: str | None = None) -> None:
        self.calls.append(("synced", version))

    def servers(self, servers: Any) -> None:
        self.calls.append(("servers", [server.url for server in servers]))

    def snapshot(self, directory: Path) -> dict[str, Any]:
        state = {"done": self.done}
        (directory / STATE_FILE).write_text(json.dumps(state))
        self.calls.append(("snapshot", self.done))
        return state

    def drain_rollouts(self) -> list[dict[str, Any]]:
        return [{"step": self.done, "trace": {}}]

    def close(self) -> None:
        self.closed = True
