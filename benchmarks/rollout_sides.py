"""One engine's run, of `rollout_engine` or `teacher_scoring`, in a process of its own that consumes as the trainer would.

    stub ◀── worker child ──▶ this process: counts samples, seconds, CPU seconds of both, resident memory

The engine's own child process is started, and samples are taken until enough were measured. Nothing is trained.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks import rollout_script

if TYPE_CHECKING:
    from trainers.config import TrainerConfig

CONCURRENCY = 256
QUEUE = 1024
STEP = {"gradient_accumulation_steps": 8, "token_budget": 16384, "max_staleness": 64}  # of ours


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: from the sample `warmup` on, until `seconds` passed (None: until the data or `samples` end).

    `length`: of a rollout, turns in `rollout_engine` and completion tokens in `teacher_scoring`.
    """

    folder: Path
    url: str
    stub_pid: int
    length: int
    warmup: int
    samples: int
    seconds: float | None


@dataclass(slots=True)
class Taken:
    """Samples that arrived together, and their tokens."""

    samples: int
    tokens: int
    trained: int


@dataclass(slots=True)
class Mark:
    """The state of the run at one moment."""

    at_s: float
    samples: int
    tokens: int
    trained: int
    cpu_s: float  # of this process and its children
    stub_cpu_s: float
    rss_mib: float

    def since(self, before: Mark) -> dict[str, float]:
        samples = self.samples - before.samples
        seconds = self.at_s - before.at_s
        return {
            "samples": samples,
            "seconds": seconds,
            "samples_per_s": samples / seconds,
            "cpu_ms_per_sample": 1000 * (self.cpu_s - before.cpu_s) / samples,
            "stub_cpu_ms_per_sample": 1000 * (self.stub_cpu_s - before.stub_cpu_s) / samples,
            "tokens_per_sample": (self.tokens - before.tokens) / samples,
            "trained_tokens_per_sample": (self.trained - before.trained) / samples,
        }


@dataclass(slots=True)
class Meter:
    """Sums up what was taken and looks at the processes."""

    stub: psutil.Process
    me: psutil.Process = field(default_factory=psutil.Process)
    samples: int = 0
    tokens: int = 0
    trained: int = 0

    def add(self, taken: Taken) -> None:
        self.samples += taken.samples
        self.tokens += taken.tokens
        self.trained += taken.trained

    def mark(self) -> Mark:
        tree = [self.me, *self.me.children(recursive=True)]
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in tree)
        rss = sum(process.memory_info().rss for process in tree)
        stub_s = sum(self.stub.cpu_times()[:2])
        return Mark(time.perf_counter(), self.samples, self.tokens, self.trained, cpu_s, stub_s, rss / 2**20)


def measured(source: Iterator[Taken], plan: Plan, memory_every: int) -> dict[str, Any]:
    """What an engine does per second and sample, by what is taken from it."""
    meter = Meter(psutil.Process(plan.stub_pid))
    first: Mark | None = None
    last: Mark | None = None
    memory: dict[int, float] = {}
    for taken in source:
        meter.add(taken)
        passed = meter.samples // memory_every
        if passed and passed * memory_every not in memory:
            memory[passed * memory_every] = round(meter.mark().rss_mib, 1)
        if first is None:
            first = meter.mark() if meter.samples >= plan.warmup else None
        elif meter.samples <= plan.samples - 2 * CONCURRENCY:  # at the end ever fewer rollouts are in flight
            last = meter.mark()
            if plan.seconds is not None and last.at_s - first.at_s >= plan.seconds:
                break
    assert first is not None and last is not None, f"{meter.samples} samples are too few to measure: raise --samples"
    return {**last.since(first), "all_samples": meter.samples, "rss_mib": memory}


def steps_taken(config: TrainerConfig, folder: Path, prompts: int) -> Iterator[Taken]:
    """The steps of a rollout process, taken as the trainer takes them; at the end every prompt must have been trained."""
    from trainers.rollouts.process import RolloutProcess

    source = RolloutProcess(config)
    try:
        source.start(resume_dir=None, version=0, world_size=1, resume_step=0)
        source.synced(0)
        index = 1
        while (step := source.next_step(index, index - 1)) is not None:
            source.request_step(index + 1, index)
            source.fetch(index, 0)
            source.drain_rollouts()
            yield Taken(step.totals.sequences, step.totals.forwarded_tokens, step.totals.tokens)
            source.committed(index)
            source.synced(index)
            index += 1
        _check_accounts(source.snapshot(folder), prompts)
    finally:
        source.close()


def _check_accounts(state: dict[str, Any], prompts: int) -> None:
    """Every prompt of the epoch was trained."""
    summary = state["epochs"]["0"]
    if summary["trained"] != prompts or summary["dropped"]:
        raise SystemExit(f"{prompts} prompts were given, but the ledger says {summary}")


def worker_arguments(folder: Path) -> dict[str, Any]:
    """What each of TRL's workers is given."""
    import datasets
    from accelerate import PartialState
    from transformers import AutoTokenizer

    PartialState()  # as a trainer has it: without, the worker's logger raises
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "dataset.jsonl").read_text().splitlines()]
    return {
        "model_name": rollout_script.MODEL,
        "dataset": datasets.Dataset.from_list(rows),
        "processing_class": tokenizer,
        "eos_token_ids": [tokenizer.eos_token_id],
    }


def samples_taken(worker: Any) -> Iterator[Taken]:
    """The samples of one of TRL's workers, taken as its trainer takes them."""
    worker.start()
    try:
        while True:
            worker.check_health(600)
            taken = Taken(0, 0, 0)
            while taken.samples < 2 * CONCURRENCY:  # as one optimizer step would
                sample = worker.rollout_buffer.get(timeout=300)
                taken.samples += 1
                taken.tokens += len(sample.input_ids)
                taken.trained += int(sample.completion_mask.sum())
            _drain(worker.metrics_queue)
            yield taken
            worker.update_model_version(worker.model_version + 1)
    finally:
        worker.stop()


def _drain(metrics: Any) -> None:
    """What the trainer does whenever it logs."""
    try:
        while True:
            metrics.get_nowait()
    except queue.Empty:
        pass
