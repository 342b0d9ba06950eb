"""Looks at /health of a run's servers, in threads, so that one that hangs holds up nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from infra.errors import ServerUnreachable
from infra.vllm_probe import request

EVERY_S = 5.0
ANSWER_S = 10.0
MOMENT_S = 1e-3


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
        self._failing: dict[str, float | None] = {}  # monotonic, first failed look in a row; None: it answered the last one

    def silent_s(self, urls: Iterable[str]) -> dict[str, float]:
        """Seconds for which each of these has failed every look; 0: it answered the last one. Those that were not looked at yet
        are left out. Does not wait.
        """
        wanted, now = set(urls), time.monotonic()
        for url, future in list(self._looks.items()):
            if not future.done():
                continue
            del self._looks[url]
            self._failing[url] = None if future.result() else self._failing.get(url) or now
        for url in wanted - self._looks.keys():
            if now >= self._next.get(url, 0.0):
                self._next[url] = now + self._every_s
                self._looks[url] = self._threads.submit(self._look, url)
        for url in self._next.keys() - wanted:
            del self._next[url]
            self._failing.pop(url, None)
        return {
            url: 0.0 if since is None else max(now - since, MOMENT_S) for url, since in self._failing.items() if url in wanted
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Silence:
    """Says of servers that are only watched, because others keep them, when one falls silent and when it answers again."""

    def __init__(self) -> None:
        self._said: set[str] = set()  # URLs of those of which it was said that they do not answer

    def say(
        self, names: Mapping[str, str], silent_s: Mapping[str, float], after_s: float, away: Collection[str] = ()
    ) -> set[str]:
        """URLs of those that answer again.

        Args:
            names: by URL, how to call them.
            silent_s: see `Pulse`.
            after_s: without an answer, after which it is said.
            away: URLs of those that are known to have been silent.
        """
        back: set[str] = set()
        for url, name in names.items():
            if url not in self._said and silent_s.get(url, 0.0) > after_s:
                print(f"{name} ({url}) has not answered on /health for {after_s:.0f} s", flush=True)
                self._said.add(url)
            elif url in self._said.union(away) and silent_s.get(url) == 0.0:
                print(f"{name} ({url}) answers again", flush=True)
                back.add(url)
        self._said -= back
        return back
