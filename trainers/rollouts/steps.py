"""Samples waiting for the trainer, and the step that is being planned from them.

    put ─▶ queue ─▶ (step requested) ─▶ stale? dropped ─▶ planner ─▶ handed over ─▶ committed

Planned steps stay here until `committed`, so that `held` is all that a snapshot must carry.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trainers.algorithms import Algorithm
from trainers.config import TrainerConfig
from trainers.metrics import MetricBag
from trainers.packing import pack_step, row_multiple
from trainers.planner import StepPlanner
from trainers.rollouts.measure import measure_step
from trainers.types import Sample, Step


@dataclass(slots=True)
class StepRequest:
    """A step the trainer asked for. `future` gives it, or None once the data is finished."""

    index: int
    train_version: int
    planner: StepPlanner
    future: asyncio.Future[Step | None]
    samples: list[Sample] = field(default_factory=list)
    waiting_since: float | None = None  # the trainer does nothing else any more


class StepQueue:
    """Queue and planner of one run.

    Args:
        version, resume_step, world_size: as in `StepSource.start`.
        token_budget: see `SourceInfo`.
        settle: called with a sample and the cause it was dropped for, or None once the step that used it is committed.
        gauge: called when a step is planned, to add what is known elsewhere to its metrics.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        metrics: MetricBag,
        *,
        token_budget: int | None,
        version: int,
        resume_step: int,
        world_size: int,
        settle: Callable[[Sample, str | None], None],
        gauge: Callable[[], None],
    ) -> None:
        self.waiting: deque[Sample] = deque()
        self.waiting_bytes = 0
        self.request: StepRequest | None = None
        self.next_index, self.next_version = resume_step + 1, version
        self._config, self._algorithm, self._metrics = config, algorithm, metrics
        self._token_budget, self._world_size = token_budget, world_size
        self._settle, self._gauge = settle, gauge
        # Recorded rows are never stale.
        self._max_staleness: int | None = getattr(config, "max_staleness", None)
        self._sync_steps: int = getattr(config, "weight_sync_steps", 1)
        asked = getattr(config, "pad_to_multiple_of", None) or 1
        self._multiple = math.lcm(asked, row_multiple(config.cp_size, config.sp_size))  # of a row's tokens
        self._planned: dict[int, list[Sample]] = {}
        self._mean_length = 0.0
        self._samples_per_step: float | None = None

    def put(self, samples: Iterable[Sample]) -> None:
        now = time.monotonic()
        for sample in samples:
            sample.queued_at = now
            length = len(sample.token_ids)
            self._mean_length = 0.98 * self._mean_length + 0.02 * length if self._mean_length else float(length)
            self.waiting.append(sample)
            self.waiting_bytes += sample.nbytes

    def open(self, index: int, train_version: int) -> StepRequest:
        """The trainer asks for step `index`; `advance` comes next."""
        assert self.request is None, f"step {index} asked for while one is open"
        assert index == self.next_index, f"step {index} asked for, {self.next_index} is next"
        planner = StepPlanner(
            self._config.gradient_accumulation_steps,
            self._world_size,
            self._token_budget,
            self._config.per_device_train_batch_size,
        )
        self.request = StepRequest(index, train_version, planner, asyncio.get_running_loop().create_future())
        self.next_version = train_version
        return self.request

    def stale(self, sample: Sample, train_version: int) -> bool:
        """Whether the sample's oldest trained token is too old for a step that trains at `train_version`."""
        return self._max_staleness is not None and train_version - sample.version_min > self._max_staleness

    def advance(self, finished: bool) -> None:
        """Move samples into the requested step; hand it over once it is full or, if the data is `finished`, partial."""
        request = self.request
        if request is None or request.future.done():
            return
        while self.waiting:
            sample = self.waiting[0]
            if self.stale(sample, request.train_version):
                self._pop()
                self._metrics.add("sample/dropped_stale_total", 1)
                self._metrics.add("cost/tokens/dropped", sample.trained_tokens)
                self._settle(sample, "stale")
            elif request.planner.add(len(sample.token_ids)):
                request.samples.append(self._pop())
                if request.planner.full:
                    return self._hand_over(request, partial=False)
            else:
                return self._hand_over(request, partial=False)
        if finished:
            self._hand_over(request, partial=True)

    def _pop(self) -> Sample:
        sample = self.waiting.popleft()
        self.waiting_bytes -= sample.nbytes
        return sample

    def _hand_over(self, request: StepRequest, partial: bool) -> None:
        """Answer the request. It stays open until then: what raises here is told to whoever waits for it."""
        if not request.samples:
            self.request = None
            request.future.set_result(None)
            return
        count = len(request.samples)
        if not partial:
            self._samples_per_step = count if self._samples_per_step is None else 0.5 * (self._samples_per_step + count)
        self._algorithm.step(request.samples)
        plan = request.planner.plan()
        self._gauge()
        generates = self._algorithm.generates
        measure_step(self._metrics, request.samples, plan, self._token_budget, request.train_version, generates, self._multiple)
        self._metrics.add("sample/rollout_queue_size", len(self.waiting))
        step = pack_step(request.index, plan, request.samples, self._metrics.drain(), self._config.teachers, self._multiple)
        self._planned[request.index] = request.samples
        self.request = None
        request.future.set_result(step)
        self.next_index = request.index + 1
        # The trainer syncs after every `weight_sync_steps` steps.
        self.next_version = request.train_version + (request.index % self._sync_steps == 0)

    def committed(self, index: int) -> None:
        """Step `index` was trained: its samples are."""
        for sample in self._planned.pop(index):
            self._settle(sample, None)

    def newest(self) -> tuple[int, list[str]]:
        """The last step handed over and the groups its samples are of."""
        index = self.next_index - 1
        return index, [sample.group for sample in self._planned.get(index, [])]

    def planned(self) -> Counter[str]:
        """Samples of each group that are in a step, or placed in the one being planned, and not trained yet."""
        steps = [*self._planned.values(), self.request.samples if self.request else []]
        return Counter(sample.group for samples in steps for sample in samples)

    @property
    def last_committed(self) -> int:
        return min(self._planned, default=self.next_index) - 1

    def held(self) -> list[Sample]:
        """Every sample that no committed step has used, in the order in which it was or will be planned."""
        planned = [sample for index in sorted(self._planned) for sample in self._planned[index]]
        return [*planned, *(self.request.samples if self.request else []), *self.waiting]

    def samples_per_step(self) -> float:
        """An estimate: as in the newest full steps; before the first from the lengths seen, else as the config says."""
        rows = self._config.gradient_accumulation_steps * self._world_size
        if self._token_budget is None or not self._mean_length:
            return rows * self._config.per_device_train_batch_size
        if self._samples_per_step is not None:
            return self._samples_per_step
        return rows * max(1.0, self._token_budget / self._mean_length)
