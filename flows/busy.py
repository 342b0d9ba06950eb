"""For how long the GPUs of a run's servers had something to do; what was leased beyond that was idle.

    every few seconds, each server that has GPUs: /metrics ─▶ requests that run or wait? ─▶ Busy.seconds

All requests count, whoever sent them: rollouts, evaluations, the probe after a weight sync. A server that does not answer
(it starts, it hangs, it is being replaced) is not busy.

This is no part of `flows.server_health`: that asks servers given by URL too, only while a trainer runs, for /health, which an
engine that is dead fails and /metrics does not. The trainer's own look at /metrics ends with the training.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from infra.errors import ServerUnreachable
from infra.vllm_probe import request

EVERY_S = 3.0
ANSWER_S = 10.0
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)


def has_requests(page: str) -> bool:
    """Whether a `/metrics` page tells of a request that runs or waits, in any engine of the server."""
    return any(float(count) > 0 for count in _REQUESTS.findall(page))


class Busy:
    """GPU seconds in which servers had requests. Between two looks a server was as busy as their mean.

    Args:
        servers: URL → its GPUs, of those that are up.
        key: what they ask for.
        page: the `/metrics` page of the server at a URL; raises `ServerUnreachable`.
    """

    def __init__(
        self,
        servers: Callable[[], Mapping[str, int]],
        key: str,
        page: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = 0.0
        self._servers, self._clock = servers, clock
        self._page = page or (lambda url: request(url, key, "/metrics", timeout=ANSWER_S).text)
        self._last: dict[str, tuple[float, bool]] = {}  # URL → when it was looked at, and whether it was busy
        self._looks = ThreadPoolExecutor(8, thread_name_prefix="busy looks")
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, in a thread, until `close`."""
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._looks:  # ended here, so that no look meets it ended
            while not self._closed.wait(EVERY_S):
                self.look()

    def look(self) -> None:
        """Once at every server."""
        servers = {url: gpus for url, gpus in self._servers().items() if gpus}
        self._last = {url: last for url, last in self._last.items() if url in servers}
        for (url, gpus), busy in zip(servers.items(), self._looks.map(self._is_busy, servers), strict=True):
            now = self._clock()
            if (last := self._last.get(url)) is not None:
                self.seconds += gpus * (now - last[0]) * (last[1] + busy) / 2
            self._last[url] = (now, busy)

    def _is_busy(self, url: str) -> bool:
        try:
            return has_requests(self._page(url))
        except (ServerUnreachable, ValueError):
            return False

    def close(self) -> None:
        self._closed.set()
