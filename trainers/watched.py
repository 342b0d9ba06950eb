"""The running mean of one metric by step, kept small enough for a row of the registry: what a sweep compares its trials by."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

MOST_POINTS = 500


class Watched:
    """Keeps a point for every `every_steps` optimizer steps, and the newest value.

    A point is the mean of the newest `average_steps` values that were logged. An attempt that resumes begins its mean anew;
    points of steps that are trained again replace none that a reader has taken already.
    """

    def __init__(self, metric: str, average_steps: int = 1, every_steps: int = 1) -> None:
        self.metric, self.every_steps = metric, every_steps
        self._newest: deque[float] = deque(maxlen=average_steps)
        self._points: deque[list[float]] = deque(maxlen=MOST_POINTS)

    def progress(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What to merge into the run's progress: `{"watched": {metric, points: [[step, mean], …], step, value}}`; {} for
        metrics without the watched one."""
        if self.metric not in metrics:
            return {}
        self._newest.append(metrics[self.metric])
        value = sum(self._newest) / len(self._newest)
        before = self._points[-1][0] if self._points else 0
        if step // self.every_steps > before // self.every_steps:
            self._points.append([step, value])
        return {"watched": {"metric": self.metric, "points": list(self._points), "step": step, "value": value}}
