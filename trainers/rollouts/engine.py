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
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainers.algorithms import Algorithm
from trainers.config import TrainerConfig
from trainers.data import PromptBuilder, Rows
from trainers.errors import ConfigError, DatasetError, NoProgress
from trainers.metrics import MetricBag
from trainers.recorded import RecordedRows
from trainers.rollouts.admission import Situation, decide
from trainers.rollouts.buffer import buffer_arrays
from trainers.rollouts.inspection import Inspection
from trainers.rollouts.ledger import Key, Ledger, begun_anew, key_of
from trainers.rollouts.measure import lost_tokens
from trainers.rollouts.reading import StreamReader
from trainers.rollouts.rejections import Rejections, check_use
from trainers.rollouts.snapshot import Snapshot, read_kept, read_samples, read_state
from trainers.rollouts.source import Dropped, RolloutSource
from trainers.rollouts.steps import StepQueue
from trainers.streams import Stream
from trainers.types import Prompt, RolloutGroup, Sample, Step

logger = logging.getLogger(__name__)


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
        rows: Rows | Stream,
        builder: PromptBuilder | RecordedRows,
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
        self.reader = StreamReader(rows, config.allow_dataset_change) if isinstance(rows, Stream) else None
        epochs = config.num_train_epochs if config.max_steps < 0 else None
        if self.reader is not None and epochs is not None and epochs != int(epochs):
            raise ConfigError(
                f"num_train_epochs={epochs:g}: how long a stream is shows only at its end, so only whole passes can be made "
                "over it. Give a whole number, or max_steps"
            )
        self.ledger = Ledger(None if isinstance(rows, Stream) else len(rows), config.seed, config.shuffle, epochs)
        self.rng = rng
        self.fingerprint = rows.fingerprint()
        self._rows, self._builder, self._metrics = rows, builder, metrics
        self._longest = min(max_sequence_tokens, token_budget or max_sequence_tokens)
        self._steps = StepQueue(
            config,
            algorithm,
            metrics,
            token_budget=token_budget,
            version=version,
            resume_step=resume_step,
            world_size=world_size,
            settle=self._settle,
            gauge=self._gauge,
        )
        self._version: int | None = None if algorithm.generates else version
        self._outstanding: dict[Key, int] = {}  # rollouts of each group that is generating or in scoring
        self._rollouts = 0  # their sum
        self._epochs_told = 0
        self._rejections = Rejections()
        self._finished = False  # the source has nothing more to give
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._moved = self._measured = time.monotonic()
        self._inspection = Inspection(config)
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
        if self._error is not None:
            raise self._error
        request = self._steps.open(index, train_version)
        self._advance()
        return await request.future

    def trainer_waits(self) -> None:
        """The trainer has nothing to do until the open request is answered: from now on, no progress is a failure."""
        if self._steps.request is not None:
            self._steps.request.waiting_since = time.monotonic()

    def committed(self, index: int) -> None:
        """Step `index` was trained."""
        self._steps.committed(index)
        self._inspection.committed(index)
        self._touch()

    def synced(self, version: int, served_as: str | None = None) -> None:
        if self.algorithm.generates:
            self._version = version
            self.source.synced(version, served_as)
        self._touch()

    def servers(self, servers: Sequence[tuple[str, str]]) -> None:
        """The servers that hold the newest policy: see `RolloutSource.servers`."""
        self.source.servers(servers)
        self._touch()

    @property
    def passes(self) -> float:
        """Passes over the prompts, once every step handed over is trained."""
        return self.ledger.passes({key_of(group): samples for group, samples in self._steps.planned().items()})

    def drain_rows(self) -> list[dict[str, Any]]:
        """What goes with the step just handed over for people to look at: see `Inspection.drain`."""
        return self._inspection.drain(*self._steps.newest())

    # Persistence

    def snapshot(self) -> Snapshot:
        """As of now; all of it copies."""
        state = {
            **self.ledger.state_dict(),
            "model_version": self._version if self._version is not None else self._steps.next_version,
            "step": self._steps.last_committed,
            "fingerprint": self.fingerprint,
            "objective": self.algorithm.objective,
            "rng": self.rng.bit_generator.state,
            "rollouts_finished": self._inspection.finished,
        }
        if self.reader is not None:
            state["stream"] = self.reader.state_dict(self.ledger.needed())
        buffered = self.config.save_rollout_buffer and self.algorithm.generates  # recorded rows are simply read again
        return Snapshot(state, buffer_arrays(self._steps.held()) if buffered else None, self._inspection.held())

    def restore(self, directory: Path) -> None:
        """Load a snapshot, before `start`.

        Raises:
            DatasetError: the dataset is not the one of the snapshot.
            ConfigError: the snapshot was written in another format.
        """
        state = read_state(directory, self._rows.source, self.fingerprint, self.config.allow_dataset_change, self._rows.cut_by)
        if state is None:
            return
        lost = isinstance(self._rows, Stream) and not self._rows.stateful
        if lost:
            logger.warning(
                "%s has no state_dict() to go on from: epoch %d is read from prompt 0 again", self._rows.source, state["epoch"]
            )
            state = begun_anew(state)
        elif self.reader is not None:
            self.reader.load_state_dict(state["stream"])
        self.ledger.load_state_dict(state)
        self.rng.bit_generator.state = state["rng"]
        self._inspection.restore(state.get("rollouts_finished", 0), read_kept(directory))
        if lost:
            return  # without its rows' numbers, a sample cannot be told from what is generated anew
        kept, version = read_samples(directory, state, self.algorithm.objective), self._steps.next_version
        fresh = [sample for sample in kept if not self._steps.stale(sample, version)]
        for group, samples in Counter(sample.group for sample in fresh).items():
            self.ledger.restored(key_of(group), samples)
        self._steps.put(fresh)

    # The source's side

    async def _run(self) -> None:
        try:
            async for outcome in self.source.groups(self._prompts()):
                if isinstance(outcome, Dropped):
                    self._drop((outcome.prompt.epoch, outcome.prompt.row), outcome.cause)
                else:
                    self._take(outcome)
                self._touch()
            check_use(self.ledger.counts().values(), len(self._steps.held()))
            self._finished = True
            self._advance()
        except Exception as error:
            self._fail(error)

    async def _prompts(self) -> AsyncIterator[Prompt]:
        """What the source generates from. If the data fails, so does the run, whatever the source makes of it."""
        try:
            async for prompt in self._admitted():
                yield prompt
        except Exception as error:
            self._fail(error)

    async def _admitted(self) -> AsyncIterator[Prompt]:
        rollouts = 1
        while True:
            await self._admission(rollouts)
            key = self.ledger.peek()
            if key is None:
                return
            row = await self._row(key)
            if row is None:
                continue
            self.ledger.next()
            prompt = self._builder.prompt(*key, row)
            rollouts = max(1, len(self.algorithm.requests(prompt)))
            self._outstanding[key] = rollouts
            self._rollouts += rollouts
            yield prompt

    async def _row(self, key: Key) -> dict[str, Any] | None:
        """The dataset's row; None: the stream ended before it, and the ledger knows."""
        if self.reader is None:
            assert isinstance(self._rows, Rows), self._rows
            return self._rows[key[1]]
        row = await self.reader.row(*key)
        if row is None:
            epoch, length = key[0], self.reader.length()
            if not length:
                raise DatasetError(f"{self._rows.source} gave no rows in epoch {epoch}: can it be read more than once?")
            self.ledger.ended(epoch, length)
            self._rejections.check(epoch, length)
            self._touch()
        self.reader.forget(self.ledger.needed())
        return row

    async def _admission(self, rollouts: int) -> None:
        """Wait until a group of `rollouts` may start, or there is none left to start."""
        while not self.ledger.exhausted:
            verdict = decide(self._situation(), rollouts)
            if verdict == "admit":
                return
            held = time.monotonic()
            self._changed.clear()
            await self._changed.wait()
            if verdict == "hold_full" and self.algorithm.generates:
                self._metrics.add("rollout/backpressure_s", time.monotonic() - held)

    def _situation(self) -> Situation:
        steps, request = self._steps, self._steps.request
        return Situation(
            version=self._version,
            next_version=steps.next_version,
            next_index=steps.next_index,
            max_steps=self.config.max_steps if self.config.max_steps > 0 else None,
            waiting=request is not None and not request.future.done() and not steps.waiting,
            planned=len(request.samples) if request else 0,
            queued=len(steps.waiting),
            outstanding=self._rollouts,
            samples_per_step=steps.samples_per_step(),
            weight_sync_steps=getattr(self.config, "weight_sync_steps", 1),
            # The queue alone bounds how far ahead recorded rows are read.
            max_staleness=getattr(self.config, "max_staleness", 2**31),
            queue_maxsize=self.config.queue_maxsize,
            queued_bytes=steps.waiting_bytes,
            queue_max_bytes=self.config.queue_max_bytes,
        )

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
            self._inspection.take(group, cause or "kept", len(fitting) if cause is None else 0)
            self._metrics.add("cost/tokens/dropped", lost_tokens(group, samples, [] if cause else fitting))
        if cause is not None:
            self._drop(key, cause)
            return
        self._rollouts -= self._outstanding.pop(key)
        self.ledger.queued(key, len(fitting))
        self._steps.put(fitting)

    def _drop(self, key: Key, cause: str) -> None:
        """A whole group is given up before it entered the queue."""
        self._rollouts -= self._outstanding.pop(key)
        self.ledger.dropped(key, cause)
        self._count_group_drop(cause)
        self._rejections.add(key[0], cause)
        self._rejections.check(key[0], self.ledger.size(key[0]))

    def _count_group_drop(self, cause: str) -> None:
        if self.algorithm.generates:
            self._metrics.add(f"rollout/dropped_groups_total/{cause}", 1)

    def _settle(self, sample: Sample, cause: str | None) -> None:
        self._inspection.settled(sample.group)
        if self.ledger.settle(key_of(sample.group), cause):
            self._count_group_drop(cause or "")

    # Shared by both sides

    def _touch(self) -> None:
        self.progress()
        self._advance()
        while self._epochs_told in self.ledger.summary:
            counts = self.ledger.summary[self._epochs_told]
            if not counts["trained"]:
                logger.warning("epoch %d had no usable prompt; dropped: %s", self._epochs_told, counts["dropped"])
            self._epochs_told += 1

    def _advance(self) -> None:
        if self._error is None:
            self._steps.advance(self._finished)
        self._changed.set()

    def _gauge(self) -> None:
        now = time.monotonic()
        self._metrics.add("epoch", self.passes)
        for name, value in self.source.gauges().items():
            self._metrics.add(name, value)
        if self.algorithm.generates:
            self._metrics.add("rollout/generated_tok_s", 0.0, now - self._measured)
        self._measured = now

    # Failure

    def _fail(self, error: BaseException) -> None:
        self._error = error
        request, self._steps.request = self._steps.request, None
        if request is not None and not request.future.done():
            request.future.set_exception(error)

    async def _watch(self) -> None:
        """End the run when the trainer waits and nothing has moved for too long."""
        limit = self.config.rollout_worker_timeout
        while self._error is None:
            await asyncio.sleep(min(1.0, limit / 4))
            request = self._steps.request
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
        if self.reader is not None and self.reader.waits_for is not None and not now.outstanding:
            return text + f"reading waits for {self.reader.waits_for}"
        return text + self.source.describe() + f"; {now.outstanding} rollouts outstanding, {now.queued} samples queued"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.reader is not None:
            self.reader.close()
        await self.source.close()
