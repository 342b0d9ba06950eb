"""What a trainer writes to the registry, behind its back.

    training thread ── progress, submit ──▶ queue ──▶ own thread ──▶ registry

Invariants: no call but `close` waits; everything is written in order; while the database is out of reach all of it waits, and
progress that was not written yet is merged.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from infra.patience import out_of_reach, patiently

logger = logging.getLogger(__name__)
CLOSE_S = 600.0  # for what the registry is still to be told when training has ended, if its database is away


class RegistryWriter:
    """Writes to the registry from a thread of its own, in order; while the database is out of reach, all of it waits."""

    def __init__(self, registry: Any, run_id: str) -> None:
        self.registry, self.run_id = registry, run_id
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._progress: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._gave_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="registry", daemon=True)
        self._thread.start()

    def progress(self, values: dict[str, Any]) -> None:
        """Merged with what is not yet written: a slow database sees fewer rows, not older ones."""
        with self._lock:
            idle = not self._progress
            self._progress.update(values)
        if idle:
            self._work.put(self._write_progress)

    def submit(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all is written. What is not by then the flow finds out for itself: checkpoints from the run's folder."""
        self._work.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("registry: out of reach for %.0f s; the run's last progress is not in it", timeout_s)
            self._gave_up.set()

    def _write_progress(self) -> None:
        with self._lock:
            values, self._progress = self._progress, {}
        try:
            self.registry.progress(self.run_id, values)
        except Exception as error:
            if out_of_reach(error):  # written again, with what has come since
                with self._lock:
                    self._progress = {**values, **self._progress}
            raise

    def _serve(self) -> None:
        while (work := self._work.get()) is not None and not self._gave_up.is_set():
            try:
                patiently(work, what="registry", wait=self._gave_up.wait)
            except Exception as error:
                logger.warning("registry: %s: %s", type(error).__name__, str(error).splitlines()[0])
