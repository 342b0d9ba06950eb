"""The trainer's side of the mirror: starts its process, tells it what was saved, hears how it goes.

    Uploads ── saved(step), finish() ──▶ mirror process (`infra.storage.mirror`)
            ◀─ thread: events ─▶ log, `on_event`

No call but `finish` waits. A mirror that dies is started again at the next save; what it had sent is not sent again.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
SAID_EVERY_S = 10.0
HURRY_S = 10.0  # of the 30 that a run has which is told to stop

OnEvent = Callable[[dict[str, Any]], None]


class Uploads:
    """The mirror of one run's folder.

    Args:
        program: the mirror process (its first line of input is `{"folder", "uri", "options", "rule"}`).
        on_event: called with every event, in a thread of its own.
    """

    def __init__(
        self,
        folder: Path,
        uri: str,
        options: dict[str, Any],
        rule: dict[str, Any],
        program: Sequence[str],
        on_event: OnEvent = lambda event: None,
    ) -> None:
        self._asked = json.dumps({"folder": str(folder.absolute()), "uri": uri, "options": options, "rule": rule})
        self.uri, self._program, self._on_event = uri, list(program), on_event
        self._newest: int | None = None
        self.failing: str | None = None  # why the last try failed; None: it did not
        self._said = 0.0
        self._start()

    def saved(self, step: int) -> None:
        """A checkpoint is whole in the folder."""
        self._newest = step
        if self._process.poll() is not None:
            logger.warning("THE UPLOAD TO %s DIED (exit code %s): it is started again", self.uri, self._process.returncode)
            self._start()
        else:
            self._tell(f"saved {step}")

    def finish(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything is stored, at most `timeout_s`; then the mirror is gone. Whether everything is stored.

        Args:
            hurry: once it says yes, there are `HURRY_S` left.
        """
        if self._process.poll() is not None:
            self._start()
        self._tell("finish")
        deadline = time.monotonic() + timeout_s
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
            if hurry():
                deadline = min(deadline, time.monotonic() + HURRY_S)
                hurry = lambda: False  # noqa: E731
        self.close()
        if code == 0:
            return True
        self.failing = self.failing or (f"not done within {timeout_s:g} s" if code is None else f"the upload died ({code})")
        logger.warning("CHECKPOINTS ARE NOT ALL IN %s: %s", self.uri, self.failing)
        return False

    def close(self) -> None:
        """End the mirror now."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._thread.join()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _start(self) -> None:
        if hasattr(self, "_process"):
            self.close()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._program, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._thread = threading.Thread(target=self._listen, args=(self._process,), name="uploads", daemon=True)
        self._thread.start()
        self._tell(self._asked)
        if self._newest is not None:
            self._tell(f"saved {self._newest}")

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # it is gone: seen at the next save, or by `finish`
            self._process.stdin.write(line + "\n")  # type: ignore[union-attr]

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            try:
                event = json.loads(line)
                self._note(event)
                self._on_event(event)
            except Exception as error:
                logger.warning("the upload says what is not understood (%s): %.200s", error, line)

    def _note(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "stored":
            rate = event["bytes"] / max(event["seconds"], 1e-3) / 1e6
            logger.info("stored %s, %s bytes, %.1f MB/s", event["uri"], f"{event['bytes']:,}", rate)
        elif kind == "failed":
            self.failing = event["error"]
            logger.warning(
                "STORING CHECKPOINTS IN %s FAILED, training goes on; next try in %.0f s: %s",
                self.uri,
                event["retry_s"],
                event["error"],
            )
        elif kind == "damaged":
            logger.warning("checkpoint %d is not stored: %s", event["step"], event["error"])
        elif kind == "progress":
            if time.monotonic() - self._said >= SAID_EVERY_S:
                self._said = time.monotonic()
                logger.info("storing step %d: %s of %s bytes", event["step"], f"{event['done']:,}", f"{event['total']:,}")
        elif kind == "idle":
            self.failing = None
