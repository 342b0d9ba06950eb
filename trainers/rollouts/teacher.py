"""One teacher of a run: what its server must be, how many requests it gets at once, and what happens when it fails.

    score ─▶ slot (at most `at_once`) ─▶ attempt ─┬▶ Scored
                      ▲                           ├ Retryable ─▶ pause, again (one budget)
                      └────── pause ◀─────────────┴ unreachable ─▶ waited for, up to the same time

Invariants:
- a request has one time budget for all its tries and pauses; time in which the server cannot be reached is not counted, unless
  it answers others meanwhile: then it is the request that breaks the connection;
- a server that cannot be reached for `budget_s` ends the run (`ServerError`), and until then holds up nothing but its own rows;
- a request that fails otherwise fails its rollout, and counts in this teacher's own window.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trainers.config_distillation import key_variable
from trainers.errors import ServerCapabilityError, ServerError
from trainers.rollouts.failures import FailureWindow
from trainers.rollouts.protocol import RequestFailed, Retryable
from trainers.rollouts.teacher_answers import Scored
from trainers.rollouts.teacher_client import KEYS, TeacherClient, TeacherNeeds
from trainers.rollouts.tries import Tries, within

_TOLD_EVERY_S = 1.0  # while it is waited for


class Teacher:
    """Scores sequences on one server.

    Args:
        name, url: as in `teacher_server_urls`.
        budget_s: seconds a request may take, all its tries and pauses together; one try takes at most half of it.
        at_once: most requests in flight.
        failure_limit: highest share of its rollouts that may fail.
        on_retry: called for every request that is sent again, with the cause.
        on_wait: called again and again while a request waits for a server that cannot be reached.
    """

    def __init__(
        self,
        name: str,
        url: str,
        needs: TeacherNeeds,
        *,
        budget_s: float,
        at_once: int,
        failure_limit: float,
        on_retry: Callable[[str], None],
        on_wait: Callable[[], None],
        first_pause_s: float = 0.5,
    ) -> None:
        self.name, self.label = name, f"teacher `{name}` ({url})"
        self.client = TeacherClient(self.label, url, needs, (key_variable(name), *KEYS))
        self.failures = FailureWindow(failure_limit, f"rollouts of {self.label}", "max_teacher_failure_frac")
        self._budget_s, self._first_pause_s = budget_s, first_pause_s
        self._slots = asyncio.Semaphore(at_once)
        self._on_retry, self._on_wait = on_retry, on_wait
        self._waiting: dict[int, float] = {}  # monotonic start of each call of `score`
        self._calls = 0
        self._down_since: float | None = None
        self._answered_at = 0.0
        self._last_error = ""
        self._jitter = random.Random(name)

    async def open(self, wait_s: float, student_max_model_len: int) -> None:
        """Connect, waiting up to `wait_s`.

        Raises:
            ServerError: it does not answer.
            ServerCapabilityError: its sequences are too short.
        """
        try:
            facts = await self.client.open(wait_s)
        except ServerError as error:
            raise ServerError(f"{self.label}: {error}") from error
        if facts.max_model_len <= student_max_model_len:
            raise ServerCapabilityError(
                f"{self.label} takes {facts.max_model_len} tokens and the student's servers {student_max_model_len}: a teacher "
                "must take more, because scoring asks for one token beyond the sequence. Start it with --max-model-len "
                f"{student_max_model_len + 1} or more, or the student's with less"
            )

    async def probe(self, wait_s: float, vocab_size: int) -> None:
        """As `TeacherClient.probe`, but for a failure of any kind, and an answer that `wait_s` did not bring: `ServerError`."""
        try:
            async with within(wait_s):
                await self.client.probe(vocab_size)
        except Retryable as error:
            raise ServerError(f"{self.label} failed at the first sequence it was to score: {error}") from error

    async def close(self) -> None:
        await self.client.close()

    async def score(self, token_ids: np.ndarray, start: int, chosen: np.ndarray | None = None) -> tuple[Scored, float]:
        """As `TeacherClient.attempt`, and the seconds it took once there was a slot.

        Raises:
            RequestFailed: refused, or out of budget.
            ServerError: the server has been gone for too long.
        """
        self._calls += 1
        call = self._calls
        self._waiting[call] = time.monotonic()
        try:
            async with self._slots:
                began = time.monotonic()
                return await self._scored(token_ids, start, chosen), time.monotonic() - began
        finally:
            del self._waiting[call]

    async def _scored(self, *request: Any) -> Scored:
        tries = Tries(self._budget_s, self._first_pause_s, self._jitter)
        while True:
            began = time.monotonic()
            try:
                async with within(tries.begin()):
                    scored = await self.client.attempt(*request)
                self._answered()
                return scored
            except RequestFailed:  # an answer as well
                self._answered()
                raise
            except Retryable as error:
                self._last_error = message = str(error)
                cause, failed_at = error.cause, time.monotonic()
            pause_s = tries.pause()
            if cause in ("connection", "reset"):
                self._down_since = self._down_since or time.monotonic()
                if time.monotonic() - self._down_since > self._budget_s:
                    raise ServerError(f"{self._trouble()}; vllm_server_timeout is {self._budget_s:g} s")
                await self._wait(pause_s)
                if self._answered_at < failed_at:
                    tries.forgive(time.monotonic() - began)
                else:
                    tries.check(0.0, cause, message)
            else:
                self._down_since = None
                tries.check(pause_s, cause, message)
                await asyncio.sleep(pause_s)
            self._on_retry(cause)

    def _answered(self) -> None:
        self._down_since, self._answered_at, self._last_error = None, time.monotonic(), ""

    async def _wait(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0:
            self._on_wait()
            await asyncio.sleep(min(left, _TOLD_EVERY_S))

    # For messages

    def _trouble(self) -> str:
        assert self._down_since is not None
        gone_s = time.monotonic() - self._down_since
        return f"{self.label} has been unreachable for {gone_s:.0f} s (last error: {self._last_error})"

    def describe(self) -> str | None:
        """What its requests wait for; None: there are none."""
        if not self._waiting:
            return None
        oldest_s = time.monotonic() - min(self._waiting.values())
        text = f"{len(self._waiting)} sequences wait for {self.label}, the oldest for {oldest_s:.0f} s"
        if self._down_since is not None:
            return f"{text}; {self._trouble()}"
        return f"{text} (last error: {self._last_error})" if self._last_error else text
