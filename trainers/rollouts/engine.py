"""From finished groups to optimizer steps: the queue, the ledger and the planner in one place.

    ledger.next ─▶ admission ─▶ RolloutSource ─▶ keep? ─▶ samples ─▶ queue ─▶ (step requested) stale? ─▶ planner ─▶ Step
       ▲                                           │                              │                       │
       └──────────── settled: dropped ◀────────────┴──────────────◀───────────────┘      committed ─▶ trained

Invariants (the property tests):
- a step is planned only when asked for; its samples stay here until `committed`;
- a snapshot holds exactly what is committed; what is planned or queued goes into the buffer, in order;
- every prompt is trained or dropped once per epoch, across any number of kills and resumes;
- no sequence of drops stops admission (see `admission`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainers.algorithms import Algorithm
from trainers.config import TrainerConfig
from trainers.data import PromptBuilder, Rows
from trainers.errors import DatasetError, NoProgress
from trainers.metrics import MetricBag
from trainers.packing import pack_step
from trainers.planner import StepPlanner
from trainers.rollouts.admission import Situation, decide
from trainers.rollouts.buffer import buffer_arrays, read_buffer, write_buffer
from trainers.rollouts.ledger import Key, Ledger
from trainers.rollouts.measure import measure_step, rollout_rows
from trainers.rollouts.source import Dropped, RolloutSource
from trainers.step_source import BUFFER_FILE, STATE_FILE
from trainers.types import RolloutGroup, Sample, Step

logger = logging.getLogger(__name__)

_ROWS_KEPT = 64  # of the rollouts table, between two steps
_REJECTED = ("filtered", "too_long", "oversize")  # an epoch of nothing else would repeat for ever


@dataclass(slots=True)
class _Request:
    index: int
    train_version: int
    planner: StepPlanner
    future: asyncio.Future[Step | None]
    samples: list[Sample] = field(default_factory=list)
    waiting_since: float | None = None  # the trainer does nothing else any more


class StepEngine:
    """Runs a `RolloutSource` and makes steps of what it gives.

    Args:
        config: the run's.
        token_budget, max_sequence_tokens: see `SourceInfo`.
        version, resume_step, world_size: as in `StepSource.start`.
        rng: draws the seed of every generation request; its state is part of the snapshot.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        source: RolloutSource,
        rows: Rows,
        builder: PromptBuilder,
        *,
        token_budget: int | None,
        max_sequence_tokens: int,
        version: int,
        resume_step: int,
        world_size: int,
        metrics: MetricBag,
        rng: np.random.Generator,
    ) -> None:
        self.config, self.algorithm, self.source = config, algorithm, source
        self.ledger = Ledger(len(rows), config.seed, config.shuffle, config.num_train_epochs if config.max_steps < 0 else None)
        self.rng = rng
        self.token_budget = token_budget
        self.fingerprint = rows.fingerprint()
        self._rows, self._builder, self._metrics = rows, builder, metrics
        self._longest = min(max_sequence_tokens, token_budget or max_sequence_tokens)
        self._world_size = world_size
        # Recorded rows are never stale.
        self._max_staleness: int = getattr(config, "max_staleness", 0)
        self._sync_steps: int = getattr(config, "weight_sync_steps", 1)
        self._version: int | None = None if algorithm.generates else version
        self._next_index, self._next_version = resume_step + 1, version
        self._queue: deque[Sample] = deque()
        self._planned: dict[int, list[Sample]] = {}
        self._outstanding: dict[Key, int] = {}  # rollouts of each group that is generating or in scoring
        self._rollouts = 0  # their sum
        self._epochs_told = 0
        self._rejected: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._request: _Request | None = None
        self._finished = False  # the source has nothing more to give
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._moved = self._measured = time.monotonic()
        self._mean_length = 0.0
        self._samples_per_step: float | None = None
        self._table: deque[dict[str, Any]] = deque(maxlen=_ROWS_KEPT)
        self._tasks: list[asyncio.Task[None]] = []

    # What the trainer asks for

    def start(self) -> None:
        """Begin to admit prompts. `restore` comes before."""
        self.ledger.close_finished()
        self._epochs_told = len(self.ledger.summary)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]

    def progress(self) -> None:
        """Something moved."""
        self._moved = time.monotonic()

    async def step(self, index: int, train_version: int) -> Step | None:
        """Plan and pack step `index`; waits for samples. None: the data is finished."""
        assert self._request is None, f"step {index} asked for while one is open"
        assert index == self._next_index, f"step {index} asked for, {self._next_index} is next"
        if self._error is not None:
            raise self._error
        rows = self.config.gradient_accumulation_steps
        planner = StepPlanner(rows, self._world_size, self.token_budget, self.config.per_device_train_batch_size)
        request = self._request = _Request(index, train_version, planner, asyncio.get_running_loop().create_future())
        self._next_version = train_version
        self._advance()
        try:
            return await request.future
        finally:
            if self._request is request:
                self._request = None

    def trainer_waits(self) -> None:
        """The trainer has nothing to do until the open request is answered: from now on, no progress is a failure."""
        if self._request is not None:
            self._request.waiting_since = time.monotonic()

    def committed(self, index: int) -> None:
        """Step `index` was trained."""
        for sample in self._planned.pop(index):
            self._settle(sample, None)
        self._touch()

    def synced(self, version: int) -> None:
        if self.algorithm.generates:
            self._version = version
            self.source.synced(version)
        self._touch()

    def drain_rows(self) -> list[dict[str, Any]]:
        """Rows of the rollouts table since the last call; the newest if there were many."""
        rows = list(self._table)
        self._table.clear()
        return rows

    # Persistence

    def snapshot(self) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
        """The state and the buffer as of now; both are copies."""
        state = {
            **self.ledger.state_dict(),
            "model_version": self._version if self._version is not None else self._next_version,
            "step": min(self._planned, default=self._next_index) - 1,
            "fingerprint": self.fingerprint,
            "rng": self.rng.bit_generator.state,
        }
        if not (self.config.save_rollout_buffer and self.algorithm.generates):
            return state, None  # recorded rows are simply read again
        held = [sample for index in sorted(self._planned) for sample in self._planned[index]]
        held += self._request.samples if self._request else []
        return state, buffer_arrays([*held, *self._queue])

    def restore(self, directory: Path) -> None:
        """Load a snapshot, before `start`.

        Raises:
            DatasetError: the dataset is not the one of the snapshot.
        """
        state = json.loads((directory / STATE_FILE).read_text())
        if state["fingerprint"] != self.fingerprint:
            if not self.config.allow_dataset_change:
                raise DatasetError(
                    f"{self._rows.source} changed: its fingerprint is {self.fingerprint}, the checkpoint's is "
                    f"{state['fingerprint']}. Restore the data, or set allow_dataset_change=true to begin anew with this one"
                )
            return  # positions of another dataset say nothing
        self.ledger.load_state_dict(state)
        self.rng.bit_generator.state = state["rng"]
        if not (directory / BUFFER_FILE).exists():
            return
        fresh = [
            sample
            for sample in read_buffer(directory / BUFFER_FILE)
            if self._next_version - sample.version_min <= self._max_staleness
        ]
        for group, samples in Counter(sample.group for sample in fresh).items():
            self.ledger.restored(_key(group), samples)
        self._enqueue(fresh)

    # The source's side

    async def _run(self) -> None:
        try:
            async for outcome in self.source.groups(self._prompts()):
                if isinstance(outcome, Dropped):
                    self._drop((outcome.prompt.epoch, outcome.prompt.row), outcome.cause)
                else:
                    self._take(outcome)
                self._touch()
            self._finished = True
            self._advance()
        except Exception as error:
            self._fail(error)

    async def _prompts(self) -> AsyncIterator[Any]:
        rollouts = 1
        while True:
            await self._admission(rollouts)
            key = self.ledger.next()
            if key is None:
                return
            prompt = self._builder.prompt(*key, self._rows[key[1]])
            rollouts = max(1, len(self.algorithm.requests(prompt)))
            self._outstanding[key] = rollouts
            self._rollouts += rollouts
            yield prompt

    async def _admission(self, rollouts: int) -> None:
        """Wait until a group of `rollouts` may start, or there is none left to start."""
        while not self.ledger.exhausted:
            verdict = decide(self._situation(), rollouts)
            if verdict == "admit":
                return
            held = time.monotonic()
            self._changed.clear()
            await self._changed.wait()
            if verdict == "hold_full":
                self._metrics_backpressure(time.monotonic() - held)

    def _metrics_backpressure(self, seconds: float) -> None:
        if self.algorithm.generates:
            self._metrics.add("rollout/backpressure_s", seconds)

    def _situation(self) -> Situation:
        request = self._request
        return Situation(
            version=self._version,
            next_version=self._next_version,
            next_index=self._next_index,
            max_steps=self.config.max_steps if self.config.max_steps > 0 else None,
            waiting=request is not None and not request.future.done() and not self._queue,
            planned=len(request.samples) if request else 0,
            queued=len(self._queue),
            outstanding=self._rollouts,
            samples_per_step=self._estimate(),
            weight_sync_steps=self._sync_steps,
            # The queue alone bounds how far ahead recorded rows are read.
            max_staleness=self._max_staleness if self.algorithm.generates else 2**31,
            queue_maxsize=self.config.queue_maxsize,
        )

    def _estimate(self) -> float:
        """Samples in a step: as in the newest full steps; before the first from the lengths seen, else as the config says."""
        rows = self.config.gradient_accumulation_steps * self._world_size
        if self.token_budget is None or not self._mean_length:
            return rows * self.config.per_device_train_batch_size
        if self._samples_per_step is not None:
            return self._samples_per_step
        return rows * max(1.0, self.token_budget / self._mean_length)

    def _take(self, group: RolloutGroup) -> None:
        key = (group.prompt.epoch, group.prompt.row)
        self.ledger.scored(key)
        cause = self.algorithm.keep(group)
        samples = self.algorithm.samples(group) if cause is None else []
        if self.algorithm.generates and cause is None:
            self._metrics.add("rollout/samples_per_rollout", len(samples), len(group.rollouts))
        samples = [sample for sample in samples if sample.loss_mask.any()]
        fitting = [sample for sample in samples if len(sample.token_ids) <= self._longest]
        if len(samples) > len(fitting):
            self._metrics.add("batch/dropped_oversize_total", len(samples) - len(fitting))
        if not fitting:
            cause = cause or ("oversize" if samples else "empty")
        if self.algorithm.generates:
            self._table.extend(rollout_rows(group, cause or "kept"))
        if cause is not None:
            self._drop(key, cause)
            return
        self._rollouts -= self._outstanding.pop(key)
        self.ledger.queued(key, len(fitting))
        self._enqueue(fitting)

    def _enqueue(self, samples: list[Sample]) -> None:
        now = time.monotonic()
        for sample in samples:
            sample.queued_at = now
            length = len(sample.token_ids)
            self._mean_length = 0.98 * self._mean_length + 0.02 * length if self._mean_length else float(length)
            self._queue.append(sample)

    def _drop(self, key: Key, cause: str) -> None:
        """A whole group is given up before it entered the queue."""
        self._rollouts -= self._outstanding.pop(key)
        self.ledger.dropped(key, cause)
        self._count_group_drop(cause)
        if cause in _REJECTED:
            rejected = self._rejected[key[0]]
            rejected[cause] += 1
            if rejected.total() == self.ledger.size(key[0]):
                counts = ", ".join(f"{count} {name}" for name, count in rejected.most_common())
                raise DatasetError(
                    f"every prompt of epoch {key[0]} was rejected ({counts}): there is nothing to train on. filtered: by "
                    "filter_prompt; too_long: prompts above the server's max_model_len − 1; oversize: sequences above "
                    "max_length or token_budget"
                )

    def _count_group_drop(self, cause: str) -> None:
        if self.algorithm.generates:
            self._metrics.add(f"rollout/dropped_groups_total/{cause}", 1)

    def _settle(self, sample: Sample, cause: str | None) -> None:
        if self.ledger.settle(_key(sample.group), cause):
            self._count_group_drop(cause or "")

    # Planning

    def _touch(self) -> None:
        self.progress()
        self._advance()
        self._changed.set()
        while self._epochs_told in self.ledger.summary:
            counts = self.ledger.summary[self._epochs_told]
            if not counts["trained"]:
                logger.warning("epoch %d had no usable prompt; dropped: %s", self._epochs_told, counts["dropped"])
            self._epochs_told += 1

    def _advance(self) -> None:
        """Move samples from the queue into the step that was asked for, and hand it over once it is full."""
        request = self._request
        if request is None or request.future.done() or self._error is not None:
            return
        while self._queue:
            sample = self._queue[0]
            if self.algorithm.generates and request.train_version - sample.version_min > self._max_staleness:
                self._queue.popleft()
                self._metrics.add("sample/dropped_stale_total", 1)
                self._settle(sample, "stale")
            elif request.planner.add(len(sample.token_ids)):
                request.samples.append(self._queue.popleft())
                if request.planner.full:
                    return self._hand_over(request, partial=False)
            else:
                return self._hand_over(request, partial=False)
        self._changed.set()
        if self._finished:
            self._hand_over(request, partial=True)

    def _hand_over(self, request: _Request, partial: bool) -> None:
        if not request.samples:
            request.future.set_result(None)
            return
        if not partial:
            old = self._samples_per_step
            self._samples_per_step = len(request.samples) if old is None else 0.5 * (old + len(request.samples))
        self.algorithm.step(request.samples)
        plan = request.planner.plan()
        self._gauge()
        measure_step(self._metrics, request.samples, plan, self.token_budget, request.train_version, self.algorithm.generates)
        self._planned[request.index] = request.samples
        request.future.set_result(pack_step(request.index, plan, request.samples, self._metrics.drain()))
        self._next_index = request.index + 1
        # The trainer syncs after every `weight_sync_steps` steps.
        self._next_version = request.train_version + (request.index % self._sync_steps == 0)
        request.samples = []
        self._request = None
        self._changed.set()

    def _gauge(self) -> None:
        now = time.monotonic()
        self._metrics.add("epoch", self.ledger.done / self.ledger.prompts)
        self._metrics.add("sample/rollout_queue_size", len(self._queue))
        for name, value in self.source.gauges().items():
            self._metrics.add(name, value)
        if self.algorithm.generates:
            self._metrics.add("rollout/generated_tok_s", 0.0, now - self._measured)
        self._measured = now

    # Failure

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if self._request is not None and not self._request.future.done():
            self._request.future.set_exception(error)

    async def _watch(self) -> None:
        """End the run when the trainer waits and nothing has moved for too long."""
        limit = self.config.rollout_worker_timeout
        while self._error is None:
            await asyncio.sleep(min(1.0, limit / 4))
            request = self._request
            if request is None or request.future.done() or request.waiting_since is None:
                continue
            if time.monotonic() - max(self._moved, request.waiting_since) > limit:
                self._fail(NoProgress(f"nothing moved for {limit:.0f} s (rollout_worker_timeout): {self.describe()}"))

    def describe(self) -> str:
        """Which stage waits for what."""
        now = self._situation()
        text = f"step {now.next_index} (trains at version {now.next_version}) has {now.planned} samples; "
        if decide(now, 1) == "hold_version":
            held = "none" if now.version is None else now.version
            return text + f"admission waits for the trainer to sync weights (the servers hold version {held})"
        return text + self.source.describe() + f"; {now.outstanding} rollouts outstanding, {now.queued} samples queued"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.source.close()


def write_snapshot(directory: Path, state: dict[str, Any], arrays: dict[str, np.ndarray] | None) -> None:
    """Write a snapshot's files. The caller makes the folder's appearance atomic."""
    directory.mkdir(parents=True, exist_ok=True)
    if arrays is not None:
        write_buffer(directory / BUFFER_FILE, arrays)
    (directory / STATE_FILE).write_text(json.dumps(state, indent=1))


def _key(group: str) -> Key:
    epoch, row = group.split(":")
    return int(epoch), int(row)
