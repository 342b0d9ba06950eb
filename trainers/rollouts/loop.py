"""Prompts to scored groups with a vLLM server: the `RolloutSource` of everything that generates, and the class users subclass.

    prompts ─▶ filter ─▶ room under the cap ─▶ n × generate_one ─▶ scoring pool ─▶ compute_advantages ─▶ groups()

Invariants:
- a prompt taken from `prompts` gives exactly one group or one `Dropped`;
- at most `cap` rollouts generate at once (one group always may); scoring does not count: a slow judge never stops generation;
- nothing a single rollout does ends the loop: it fails, is counted, and its group goes on if two remain;
- where a policy version is an adapter, all turns of a group use the one it began with; once that leaves the window, they are
  given up, and the group counts as stale.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainers.algorithms import Algorithm, GenerationRequest
from trainers.config import AsyncTrainerConfig
from trainers.data import Rows
from trainers.errors import ConfigError, NoProgress, ServerError
from trainers.metrics import MetricBag, sanitize
from trainers.rollouts.blame import user_traceback
from trainers.rollouts.conversation import Conversations, Limits
from trainers.rollouts.failures import FailureWindow
from trainers.rollouts.group_scorer import GroupScorer
from trainers.rollouts.pool import Lease, ServerPool
from trainers.rollouts.protocol import RequestFailed
from trainers.rollouts.source import Dropped
from trainers.streams import Stream
from trainers.types import Message, Prompt, Rollout, RolloutGroup, TurnRecord

_REQUEST: contextvars.ContextVar[GenerationRequest] = contextvars.ContextVar("request of this rollout")
_LEASE: contextvars.ContextVar[Lease] = contextvars.ContextVar("server of this rollout")
_ADAPTER: contextvars.ContextVar[tuple[int, str] | None] = contextvars.ContextVar("adapter of this rollout", default=None)


class AsyncRolloutLoop:
    """Generates, scores and computes credit. Subclass it to change one of these; name the subclass in a trainer's `loop_cls`.

    Hooks: `setup`, `filter_prompt`, `generate_one`, `compute_advantages`. It is built in the rollout process: define the
    subclass at the top level of a module or script, and create clients in `setup`, which runs on the loop's own event loop.

    Attributes:
        config: the run's configuration; the object given as `args` when a trainer class started the run.
        rows: the dataset (`Rows`, or `Stream`).
        tokenizer: the student's.
    """

    def __init__(
        self,
        config: Any,
        *,
        settings: AsyncTrainerConfig,
        algorithm: Algorithm,
        rows: Rows | Stream,
        tokenizer: Any,
        pool: ServerPool,
        conversations: Conversations,
        scorer: GroupScorer,
        metrics: MetricBag,
        next_seed: Callable[[], int],
        progress: Callable[[], None],
    ) -> None:
        self.config = config
        self.rows = rows
        self.tokenizer = tokenizer
        self.max_sequence_tokens = 0
        self._settings, self._algorithm = settings, algorithm
        self._pool, self._conversations, self._scorer, self._metrics = pool, conversations, scorer, metrics
        self._next_seed, self._progress = next_seed, progress
        self._failures = FailureWindow(settings.max_rollout_failure_frac)
        self._version = 0
        self._served_as: str | None = None  # the adapter of that version
        self._begun: dict[asyncio.Timeout, int] = {}  # groups that use an adapter, and its version
        self._generating: dict[Lease, float] = {}  # monotonic start

    # Hooks

    async def setup(self) -> None:
        """Runs once, before the first prompt."""

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether to generate from this row in this epoch. A rejected prompt counts towards the epoch."""
        return True

    async def generate_one(self, prompt: Prompt) -> Rollout:
        """One rollout. May set its `reward`, to which those of the reward functions are added."""
        return await self.converse(prompt)

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [G]: the algorithm's advantages. Runs for every group, also one that is dropped afterwards."""
        return self._algorithm.advantages(group)

    # For hooks

    async def converse(self, prompt: Prompt, messages: Sequence[Message] | None = None) -> Rollout:
        """A conversation with the run's tools and, where it has one, an environment of its own.

        Args:
            messages: what it begins with, in place of the prompt's messages.

        Raises:
            RequestFailed: the server, a tool or the environment gave up on it.
        """
        if messages is not None:
            prompt = replace(prompt, messages=list(messages), token_ids=self._conversations.chat.prompt_ids(messages))
        limits = Limits(_REQUEST.get().max_tokens, self.max_sequence_tokens)
        return await self._conversations.run(prompt, self.turn, limits)

    async def turn(self, prompt_ids: np.ndarray, max_tokens: int | None = None) -> TurnRecord:
        """One generation call from token ids, with the temperature the algorithm asked for.

        Args:
            max_tokens: most tokens to sample; None: what the algorithm asked for.

        Raises:
            RequestFailed: refused by the server, or out of time.
        """
        request = _REQUEST.get()
        room = self.max_sequence_tokens - len(prompt_ids)
        if room < 1:
            raise RequestFailed(
                "too_long", f"{len(prompt_ids)} tokens leave no room in max_model_len {self.max_sequence_tokens}"
            )
        began_s = time.time()
        adapter = _ADAPTER.get()
        turn = await self._pool.turn(
            prompt_ids,
            lease=_LEASE.get(),
            temperature=request.temperature,
            max_tokens=min(request.max_tokens if max_tokens is None else max_tokens, room),
            seed=self._next_seed(),
            version=lambda: adapter[0] if adapter is not None else self._version,
            adapter=adapter[1] if adapter is not None else None,
        )
        turn.began_s, turn.ended_s = began_s, time.time()
        self._progress()
        return turn

    # The source

    async def open(self) -> None:
        facts = await self._pool.open(wait_s=min(self._settings.vllm_server_timeout, self._settings.rollout_worker_timeout))
        self.max_sequence_tokens = facts.max_model_len
        await self._scorer.open(facts.max_model_len)
        outcome = self.setup()
        if inspect.isawaitable(outcome):
            limit_s = self._settings.rollout_worker_timeout
            try:
                async with asyncio.timeout(limit_s) as scope:
                    await outcome
            except TimeoutError as error:
                if not scope.expired():
                    raise  # one of its own
                raise NoProgress(
                    f"{type(self).__name__}.setup() did not return within {limit_s:.0f} s (rollout_worker_timeout)"
                ) from error

    def synced(self, version: int, served_as: str | None = None) -> None:
        self._version, self._served_as = version, served_as
        for scope, begun in self._begun.items():
            if begun < version - self._settings.max_staleness and not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    def servers(self, servers: Sequence[tuple[str, str]]) -> None:
        self._pool.members(servers)

    async def groups(self, prompts: AsyncIterator[Prompt]) -> AsyncIterator[RolloutGroup | Dropped]:
        ready: asyncio.Queue[RolloutGroup | Dropped | BaseException | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        feeder = asyncio.create_task(self._feed(prompts, ready, tasks))
        try:
            while (item := await ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
                self._failures.check()
            self._failures.check(final=True)
            self._scorer.check(final=True)
        finally:
            for task in [feeder, *tasks]:
                task.cancel()
            await asyncio.gather(feeder, *tasks, return_exceptions=True)

    async def _feed(self, prompts: AsyncIterator[Prompt], ready: asyncio.Queue, tasks: set[asyncio.Task[None]]) -> None:
        try:
            async for prompt in prompts:
                if not _now(self, "filter_prompt", self.filter_prompt(prompt.row, prompt.data, prompt.epoch)):
                    ready.put_nowait(Dropped(prompt, "filtered"))
                    await asyncio.sleep(0)
                elif len(prompt.token_ids) > self.max_sequence_tokens - 1:
                    ready.put_nowait(Dropped(prompt, "too_long"))
                    await asyncio.sleep(0)
                else:
                    requests = self._algorithm.requests(prompt)
                    while not self._pool.room(len(requests)):
                        self._pool.changed.clear()
                        await self._pool.changed.wait()
                    leases = [self._begin() for _ in requests]
                    task = asyncio.create_task(self._group(prompt, requests, leases, ready))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    def _begin(self) -> Lease:
        lease = self._pool.lease()
        self._generating[lease] = time.monotonic()
        return lease

    async def _group(
        self, prompt: Prompt, requests: list[GenerationRequest], leases: list[Lease], ready: asyncio.Queue
    ) -> None:
        try:
            rollouts = await self._generated(prompt, requests, leases)
            if rollouts is None:
                ready.put_nowait(Dropped(prompt, "stale"))
                return
            group = RolloutGroup(prompt, [rollout for rollout in rollouts if rollout.failed is None])
            await self._scorer.score(group)
            for rollout in rollouts:
                self._note(rollout)
            group.rollouts = [rollout for rollout in group.rollouts if rollout.failed is None]
            if len(group.rollouts) < min(2, len(requests)):
                ready.put_nowait(Dropped(prompt, "failed"))
                return
            advantages = _now(self, "compute_advantages", self.compute_advantages(group))
            group.advantages = _one_each(self, advantages, len(group.rollouts))
            self._measure(group)
            ready.put_nowait(group)
        except Exception as error:  # a fault in a hook or here: the run ends with it
            ready.put_nowait(error)

    async def _generated(self, prompt: Prompt, requests: list[GenerationRequest], leases: list[Lease]) -> list[Rollout] | None:
        """A rollout per request; None: the adapter they began with left the window before they were done."""
        _ADAPTER.set(None if self._served_as is None else (self._version, self._served_as))
        work = [self._rollout(prompt, request, lease) for request, lease in zip(requests, leases, strict=True)]
        if self._served_as is None:
            return await asyncio.gather(*work)
        try:
            async with asyncio.timeout(None) as scope:
                self._begun[scope] = self._version
                try:
                    return await asyncio.gather(*work)
                finally:
                    del self._begun[scope]
        except TimeoutError:
            return None

    async def _rollout(self, prompt: Prompt, request: GenerationRequest, lease: Lease) -> Rollout:
        _REQUEST.set(request)
        _LEASE.set(lease)
        begun, finished = time.monotonic(), False
        try:
            rollout = await self.generate_one(prompt)
            self._conversations.finish(rollout)
            finished = True
        except RequestFailed as error:
            rollout = Rollout(prompt, failed=f"{error.cause}: {error}")
            rollout.failed_by = user_traceback(error) if error.__cause__ is not None else None
        except ServerError:
            raise  # no matter of this rollout alone
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run ends, or the group is given up; else something that the hook awaited was cancelled
            rollout = Rollout(prompt, failed=f"generate: {type(error).__name__}: {error}", failed_by=user_traceback(error))
        finally:
            del self._generating[lease]
            self._pool.release(lease, finished)
        rollout.duration_s = time.monotonic() - begun
        return rollout

    def _note(self, rollout: Rollout) -> None:
        if rollout.failed is None:
            self._failures.add(None)
            return
        cause, _, message = rollout.failed.partition(": ")
        if cause not in self._scorer.judges:
            self._failures.add(cause, message, rollout.failed_by)
        self._metrics.add(f"rollout/failed_total/{sanitize(cause)}", 1)

    def _measure(self, group: RolloutGroup) -> None:
        add = self._metrics.add
        for rollout in group.rollouts:
            length = rollout.sampled_tokens
            ended = bool(rollout.turns) and rollout.turns[-1].finish_reason == "stop"
            add("completions/mean_length", length)
            add("cost/tokens/generated", length)
            add("completions/min_length", length)
            add("completions/max_length", length)
            add("completions/clipped_ratio", float(not ended))
            # One token that ended the completion is EOS and nothing else.
            add("completions/empty_total", float(length == 0 or (length == 1 and ended)))
            add("rollout/duration_s", rollout.duration_s)
            add("rollout/turns_mean", len(rollout.turns))
            add("rollout/turns_max", len(rollout.turns))
            add("rollout/generated_tok_s", length, 0.0)  # the engine adds the seconds
        self._conversations.measure(group.rollouts)
        rewards = group.rewards[~np.isnan(group.rewards)]
        if len(rewards):
            add("reward", rewards.sum(), len(rewards))
            add("reward_std", rewards.std())
            add("rollout/correctness_mean", float((rewards > 0).sum()), len(rewards))

    def describe(self) -> str:
        if self._generating:
            oldest = time.monotonic() - min(self._generating.values())
            text = f"generation waits for {self._pool.describe()}: {len(self._generating)} rollouts in flight, the oldest for "
            return text + f"{oldest:.0f} s{self._pool.trouble}{self._conversations.describe()}"
        if self._scorer.pending:
            return self._scorer.describe()
        return "generation is idle"

    def gauges(self) -> dict[str, float]:
        return {
            **self._pool.gauges(),
            "rollout/score_queue_size": self._scorer.pending,
        }

    async def close(self) -> None:
        await self._scorer.close()
        await self._conversations.close()
        await self._pool.close()


def _now(loop: AsyncRolloutLoop, hook: str, value: Any) -> Any:
    """What a synchronous hook returned. A coroutine is refused: as a value it would be true, whatever it comes to."""
    if not inspect.iscoroutine(value):
        return value
    value.close()
    raise ConfigError(f"{type(loop).__name__}.{hook} is async: write it with `def`, as all but setup and generate_one are")


def _one_each(loop: AsyncRolloutLoop, advantages: Any, rollouts: int) -> np.ndarray:
    """float32 [G]: what `compute_advantages` returned. Whether they are finite matters only where the group is kept."""
    try:
        values = np.asarray(advantages, dtype=np.float32)
    except (TypeError, ValueError):
        values = None
    if advantages is None or values is None or values.shape != (rollouts,):
        gave = repr(advantages) if values is None or not values.ndim else f"an array of shape {values.shape}"
        raise ConfigError(
            f"{type(loop).__name__}.compute_advantages returned {gave} for {rollouts} rollouts: return one number per rollout "
            "of group.rollouts, in that order"
        )
    return values
