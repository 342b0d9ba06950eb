"""Looks at /health of a run's servers, in threads, so that one that hangs holds up nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from infra.errors import ServerUnreachable
from infra.vllm_probe import request

EVERY_S = 5.0
ANSWER_S = 10.0


def answers(url: str) -> bool:
    try:
        return request(url, None, "/health", timeout=ANSWER_S).status_code == 200
    except ServerUnreachable:
        return False


class Pulse:
    """Since when each server has not answered.

    Args:
        look: whether the server at a URL is healthy; may block for some seconds.
    """

    def __init__(self, look: Callable[[str], bool] = answers, every_s: float = EVERY_S) -> None:
        self._look, self._every_s = look, every_s
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="health")
        self._looks: dict[str, Future[bool]] = {}
        self._next: dict[str, float] = {}
        self._failing: dict[str, float] = {}  # monotonic time of the first look in a row that failed

    def silent_s(self, urls: Iterable[str]) -> dict[str, float]:
        """Seconds for which each of these has failed every look; 0: it answered the last one. Does not wait."""
        wanted, now = set(urls), time.monotonic()
        for url, future in list(self._looks.items()):
            if not future.done():
                continue
            del self._looks[url]
            if future.result():
                self._failing.pop(url, None)
            else:
                self._failing.setdefault(url, now)
        for url in wanted - self._looks.keys():
            if now >= self._next.get(url, 0.0):
                self._next[url] = now + self._every_s
                self._looks[url] = self._threads.submit(self._look, url)
        for known in (self._next, self._failing):
            for url in known.keys() - wanted:
                del known[url]
        return {url: now - self._failing[url] if url in self._failing else 0.0 for url in wanted}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
