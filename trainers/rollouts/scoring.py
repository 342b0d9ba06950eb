"""Rewards of a group, in a bounded pool: a slow judge holds up scoring, never generation.

    group ─▶ slot (at most `workers` groups at once) ─▶ each reward function ─▶ Σ weight × reward over the applicable ones

Synchronous functions run in threads, asynchronous ones on an event loop of their own, so that one that blocks cannot stop the
loop that generates. A function that raises on the group is called once more per rollout, so that only those at fault fail.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from trainers.metrics import MetricBag, sanitize
from trainers.rewards import RewardFunc, reward_name
from trainers.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)


class _LoopThread:
    """An event loop in a thread, started when first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Any) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="async rewards", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    def stop(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1)  # one that blocks is left behind


class _Function:
    """A reward function with its unique name, weight, and the keyword arguments it takes."""

    def __init__(self, function: RewardFunc, name: str, weight: float) -> None:
        self.function, self.name, self.weight = function, name, weight
        self.told = False  # an error's traceback was logged
        call = function if inspect.isroutine(function) or not callable(function) else function.__call__
        target = getattr(function, "func", call)  # functools.partial
        self.is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}

    def arguments(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        prompt = rollouts[0].prompt
        values: dict[str, list[Any]] = {name: [value] * len(rollouts) for name, value in prompt.columns.items()}
        values["prompts"] = [prompt.messages] * len(rollouts)
        values["completions"] = [rollout.completion for rollout in rollouts]
        values["completion_ids"] = [
            np.concatenate([turn.output_ids for turn in rollout.turns]).tolist() if rollout.turns else []
            for rollout in rollouts
        ]
        return values if self._takes_all else {name: value for name, value in values.items() if name in self._names}


def _unique_names(functions: Sequence[RewardFunc]) -> list[str]:
    names: list[str] = []
    for function in functions:
        base = name = sanitize(reward_name(function))
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


class Scorer:
    """Scores groups in place.

    Args:
        functions, weights: reward functions and what their values are multiplied with (None: 1).
        workers: groups scored at once.
        metrics: where `rewards/…` and `rollout/score_…` go.
    """

    def __init__(
        self, functions: Sequence[RewardFunc], weights: Sequence[float] | None, metrics: MetricBag, workers: int = 8
    ) -> None:
        weights = [1.0] * len(functions) if weights is None else weights
        self.functions = [
            _Function(*parts) for parts in zip(functions, _unique_names(functions), map(float, weights), strict=True)
        ]
        self.pending = 0  # groups waiting for or in scoring
        self._metrics = metrics
        self._slots = asyncio.Semaphore(workers)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._loop_thread = _LoopThread()

    async def score(self, group: RolloutGroup) -> None:
        """Set `rewards`, `reward` or `failed` of every rollout. A reward already set by a custom `generate_one` is added to."""
        if not self.functions:
            return
        arrived = time.monotonic()
        self.pending += 1
        try:
            async with self._slots:
                begun = time.monotonic()
                self._metrics.add("rollout/score_wait_s", begun - arrived)
                for function in self.functions:
                    await self._apply(function, [rollout for rollout in group.rollouts if rollout.failed is None])
                for rollout in group.rollouts:
                    if rollout.failed is None:
                        self._total(rollout)
                self._metrics.add("rollout/score_s", time.monotonic() - begun)
        finally:
            self.pending -= 1

    async def _apply(self, function: _Function, rollouts: list[Rollout]) -> None:
        if not rollouts:
            return
        try:
            values = await self._call(function, rollouts)
        except Exception as error:
            if len(rollouts) == 1:
                rollouts[0].failed = f"reward: {function.name}: {type(error).__name__}: {error}"
                if not function.told:  # once: the run's cause has the message, where it was raised only stands here
                    function.told = True
                    logger.warning(
                        "reward function %s raised; further errors of it are counted only", function.name, exc_info=error
                    )
                return
            for rollout in rollouts:
                await self._apply(function, [rollout])
            return
        for rollout, value in zip(rollouts, values, strict=True):
            self._metrics.add(f"rewards/{function.name}_none_frac", float(value is None))
            if value is not None:
                value = float(value)
                if not math.isfinite(value):
                    rollout.failed = f"reward: {function.name} returned {value}"
                    continue
                self._metrics.add(f"rewards/{function.name}", value)
            rollout.rewards[function.name] = value

    async def _call(self, function: _Function, rollouts: list[Rollout]) -> list[Any]:
        arguments = function.arguments(rollouts)
        if function.is_async:
            values = await self._loop_thread.run(function.function(**arguments))
        else:
            loop = asyncio.get_running_loop()
            values = await loop.run_in_executor(self._threads, lambda: function.function(**arguments))
        values = list(values)
        if len(values) != len(rollouts):
            raise ValueError(f"returned {len(values)} values for {len(rollouts)} completions")
        return values

    def _total(self, rollout: Rollout) -> None:
        applicable = [(function.weight, rollout.rewards.get(function.name)) for function in self.functions]
        parts = [weight * value for weight, value in applicable if value is not None]
        if not math.isnan(rollout.reward):
            parts.append(rollout.reward)
        rollout.reward = sum(parts) if parts else math.nan

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop_thread.stop()
