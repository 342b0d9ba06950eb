"""What ended runs could not send to MLflow while it was away is sent when it is back, by the daemon of `loopwright up`.

    every pass: ended runs with records that no sender got to ─▶ one at a time: python -m infra.tracking FOLDER

In a process of its own, because importing MLflow takes memory that the daemon would keep. A folder that is not done is tried
again after a pause that doubles up to an hour.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from infra.outbox import leftover
from infra.reaper import owner_alive
from infra.registry import Registry

FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0


class Leftovers:
    """Call `send` now and then; it returns at once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._child: subprocess.Popen[bytes] | None = None
        self._pauses: dict[Path, tuple[float, float]] = {}  # (not before, pause)

    def send(self) -> Path | None:
        """The folder that is being sent now, if that has just begun."""
        if self._child is not None:
            if self._child.poll() is None:
                return None
            self._child = None
        for folder in self._ended():
            not_before, pause = self._pauses.get(folder, (0.0, FIRST_PAUSE_S))
            if time.monotonic() >= not_before and leftover(folder / "tracking"):
                self._pauses[folder] = (time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE_S))
                command = [sys.executable, "-m", "infra.tracking", str(folder)]
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                return folder
        return None

    def _ended(self) -> list[Path]:
        runs = [run for run in self._registry.list_runs(light=True) if not (run.owner and owner_alive(run.owner))]
        return [Path(run.output_dir) for run in runs if run.output_dir and run.status not in ("RUNNING", "PENDING")]

    def close(self) -> None:
        """End the process that sends; what it has not sent stays where it is."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
