"""How often a request is tried: one time budget for all its tries and the pauses between them.

    begin ─▶ a try, within its limit ─▶ Retryable ─▶ pause, about twice the last ─▶ time left? ─▶ begin
                                                                                      └─ no: RequestFailed

What cannot be reached at all is not tried in vain: whoever waits for it says how much of that time is not to count.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trainers.rollouts.protocol import RequestFailed, Retryable

LONGEST_PAUSE_S = 10.0


class Tries:
    """Of one request. Times are seconds.

    Args:
        budget_s: for all tries and pauses. One try takes at most half of it, so that an answer that was lost leaves time for
            another.
        first_pause_s: the next ones are longer, up to `LONGEST_PAUSE_S`.
        jitter: so that those who failed together do not come back together.
    """

    def __init__(self, budget_s: float, first_pause_s: float, jitter: random.Random) -> None:
        self._budget_s, self._pause_s, self._jitter = budget_s, first_pause_s, jitter
        self._deadline = time.monotonic() + budget_s
        self._count = 0

    def begin(self) -> float:
        """One more try; how long it may take."""
        self._count += 1
        return min(self._deadline - time.monotonic(), self._budget_s / 2)

    def pause(self) -> float:
        """How long to wait before the next try."""
        now_s = self._pause_s * (0.75 + 0.5 * self._jitter.random())
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        return now_s

    def check(self, pause_s: float, cause: str, message: str | None) -> None:
        """Raises `RequestFailed`, of the last try's failure, if no time is left after such a pause."""
        if self._deadline - time.monotonic() <= pause_s:
            spent = f"{self._count} tries in vllm_server_timeout, {self._budget_s:g} s"
            raise RequestFailed(cause, f"{message} (given up after {spent})")

    def forgive(self, seconds: float) -> None:
        """Do not count so much of the time that went by."""
        self._deadline += seconds


@asynccontextmanager
async def within(limit_s: float, whom: str = "") -> AsyncIterator[asyncio.Timeout]:
    """Raises `Retryable` with cause `timeout` if what is done inside takes longer. `whom`: for the message."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s) as scope:
            yield scope
    except TimeoutError as error:
        waited_s = time.monotonic() - began
        raise Retryable("timeout", f"{whom}no answer within {waited_s:.1f} s") from error
