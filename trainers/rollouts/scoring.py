"""Rewards of a group, in a bounded pool: a slow judge holds up scoring, never generation.

    group ─▶ slot (at most `workers` groups at once) ─▶ each reward function ─▶ Σ weight × reward over the applicable ones
                                                                              + what the environment or `generate_one` gave

Functions run beside the loop that generates (see `side_calls`), so that one that blocks cannot stop it. A function that
raises on the group is called once more per rollout, so that only those at fault fail.

Invariants:
- a rollout leaves with a finite reward, with NaN because nothing applied to it, or with `failed`;
- nothing a function does to a rollout ends the run, except a `ConfigError`: that is true of every rollout;
- `describe` names the call that has run longest, for a watchdog that finds that nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainers.errors import ConfigError
from trainers.metrics import MetricBag, sanitize
from trainers.rewards import RewardFunc, reward_name
from trainers.rollouts.blame import user_traceback, where
from trainers.rollouts.group_scorer import GroupScorer
from trainers.rollouts.side_calls import SideCalls
from trainers.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_UNLIMITED_S = 1e9  # a judge may take its time; one that never returns is a matter of the watchdog, which names it
_MESSAGE_CHARS = 500
_SHOWN_CHARS = 100  # of what a function returned


class _Function:
    """A reward function with its unique name, weight, and the keyword arguments it takes."""

    def __init__(self, function: RewardFunc, name: str, weight: float) -> None:
        self.function, self.name, self.weight = function, name, weight
        self.told = False  # an error's traceback was logged
        target = getattr(function, "func", function)  # functools.partial
        self.is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
        parameters = inspect.signature(function).parameters.values()
        self.calls: dict[int, tuple[float, int]] = {}  # number of a running call → monotonic start, completions
        self._numbers = itertools.count()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}

    @contextlib.contextmanager
    def call(self, completions: int) -> Iterator[None]:
        """Note a call while it runs."""
        number = next(self._numbers)
        self.calls[number] = (time.monotonic(), completions)
        try:
            yield
        finally:
            del self.calls[number]

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
    """Names whose metrics do not collide: neither with one another's nor with what is derived from them."""
    names: list[str] = []
    taken: set[str] = set()
    for function in functions:
        base = name = sanitize(reward_name(function))
        number = 2
        while taken & (metrics := {name, f"{name}_none_frac", f"{name}_call_s"}):
            name, number = f"{base}_{number}", number + 1
        names.append(name)
        taken |= metrics
    return names


def _number(value: Any) -> float | None:
    """A custom loop's reward as a number, NaN for none; None: it is no number."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


class Scorer(GroupScorer):
    """Rewards of a run's functions.

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
        self._side = SideCalls(workers, _UNLIMITED_S)

    async def score(self, group: RolloutGroup) -> None:
        """Set `rewards`, `reward` or `failed` of every rollout.

        A reward that a custom `generate_one` set, and those in `rewards` that are none of the functions' (an environment's),
        are added with weight 1.

        Raises:
            ConfigError: a function says that the configuration is wrong.
        """
        if self.functions:
            arrived, full = time.monotonic(), self._slots.locked()
            self.pending += 1
            try:
                async with self._slots:
                    begun = time.monotonic()
                    self._metrics.add("rollout/score_wait_s", begun - arrived)
                    if full:
                        self._metrics.add("rollout/score_block_s", begun - arrived)
                    for function in self.functions:
                        await self._apply(function, [rollout for rollout in group.rollouts if rollout.failed is None])
                    self._metrics.add("rollout/score_s", time.monotonic() - begun)
            finally:
                self.pending -= 1
        for rollout in group.rollouts:
            if rollout.failed is None:
                self._total(rollout)

    async def _apply(self, function: _Function, rollouts: list[Rollout]) -> None:
        if not rollouts:
            return
        failure: Exception | None = None  # handled below, so that what the calls one by one raise does not come with this one
        values: list[float | None] = []
        try:
            values = await self._call(function, rollouts)
        except ConfigError:
            raise
        except Exception as error:
            failure = error
        if failure is not None:
            if len(rollouts) == 1:
                self._failed(function, rollouts[0], failure)
            elif function.is_async:  # together, because each may take as long as the group did
                await asyncio.gather(*(self._apply(function, [rollout]) for rollout in rollouts))
            else:
                for rollout in rollouts:
                    await self._apply(function, [rollout])
            return
        for rollout, value in zip(rollouts, values, strict=True):
            self._metrics.add(f"rewards/{function.name}_none_frac", float(value is None))
            if value is not None:
                if not math.isfinite(value):
                    rollout.failed = f"reward: {function.name} returned {value}"
                    continue
                self._metrics.add(f"rewards/{function.name}", value)
            rollout.rewards[function.name] = value

    def _failed(self, function: _Function, rollout: Rollout, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS]
        place = where(error)
        rollout.failed = f"reward: {function.name}: {message}" + (f" ({place})" if place else "")
        rollout.failed_by = user_traceback(error)
        if not function.told:  # once: the run's cause says where, the whole traceback stands only here
            function.told = True
            logger.warning("reward function %s raised; further errors of it are counted only", function.name, exc_info=error)

    async def _call(self, function: _Function, rollouts: list[Rollout]) -> list[float | None]:
        arguments = function.arguments(rollouts)
        begun = time.monotonic()
        with function.call(len(rollouts)):
            values = await self._side.call(function.function, **arguments)
        self._metrics.add(f"rewards/{function.name}_call_s", time.monotonic() - begun)
        expected = "a reward function returns a list with one number, or None where it does not apply, per completion"
        try:
            values = [None if value is None else float(value) for value in values]
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"returned {str(values)[:_SHOWN_CHARS]} ({error}); {expected}") from error
        if len(values) != len(rollouts):
            raise ValueError(f"returned {len(values)} values for {len(rollouts)} completions; {expected}")
        return values

    def _total(self, rollout: Rollout) -> None:
        weights = {function.name: function.weight for function in self.functions}
        given = [(weights.get(name, 1.0), value) for name, value in rollout.rewards.items()]
        parts = [weight * value for weight, value in given if value is not None]
        if (given_reward := _number(rollout.reward)) is None:
            rollout.failed = f"reward: `generate_one` set {rollout.reward!r}: set a number, or leave it NaN for none"
            rollout.reward = math.nan
            return
        if not math.isnan(given_reward):
            parts.append(given_reward)
        rollout.reward = sum(parts) if parts else math.nan
        if parts and not math.isfinite(rollout.reward):
            rollout.failed = f"reward: the sum of {rollout.rewards} and what `generate_one` set is {rollout.reward}"

    def describe(self) -> str:
        """Which call groups wait for."""
        now = time.monotonic()
        running = [
            (now - begun, function.name, count) for function in self.functions for begun, count in function.calls.values()
        ]
        text = f"scoring: {self.pending} groups wait for the reward functions"
        if not running:
            return text
        seconds, name, count = max(running)
        return f"{text}; `{name}` has not returned for {seconds:.0f} s, called with {count} completions"

    async def close(self) -> None:
        """End the pool, after `aclose()` of each function that has one, on the loop on which asynchronous functions run."""
        for function in self.functions:
            if (ending := getattr(function.function, "aclose", None)) is not None:
                with contextlib.suppress(Exception):
                    await self._side.call_within(_CLOSE_S, ending)
        self._side.close()
