"""A hand-written `Backend`: an MLflow in memory that can be down, lose answers and refuse, and keeps every duplicate."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.outbox import Point
from infra.tracking_mlflow import Rejected


class FakeMlflow:
    """One server; `connect` is what `Tracker` takes as `backend`."""

    def __init__(self) -> None:
        self.down = False
        self.gate = threading.Event()  # cleared: requests hang
        self.gate.set()
        self.fail_after: list[bool] = []  # per write: True: it is stored, and the answer is lost
        self.refuse = lambda point: False
        self.refuse_traces = False
        self.runs: list[str] = []
        self.keys: dict[str, str] = {}
        self.points: list[Point] = []
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.datasets: list[dict[str, Any]] = []
        self.artifacts: dict[str, Any] = {}
        self.traces: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, str] = {}
        self.statuses: list[str] = []
        self.requests = 0

    def connect(self, uri: str, experiment: str) -> FakeMlflow:
        self._request()
        return self

    def _request(self) -> None:
        self.requests += 1
        self.gate.wait()
        if self.down:
            raise ConnectionError("connection refused")

    def _answer(self) -> None:
        if self.fail_after and self.fail_after.pop(0):
            raise ConnectionError("the answer was lost")

    def open_run(self, run_id: str | None, key: str, start_ms: int, tags: dict[str, str]) -> str:
        self._request()
        if run_id is None:
            run_id = self.keys.get(key)
        if run_id is None:
            run_id = f"run{len(self.runs)}"
            self.runs.append(run_id)
            self.keys[key] = run_id
            self.tags.update(tags)
        self._answer()
        return run_id

    def last_steps(self, run_id: str) -> dict[str, int]:
        self._request()
        steps: dict[str, int] = {}
        for point in self.points:
            steps[point.name] = max(point.step, steps.get(point.name, 0))
        return steps

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        self._request()
        if any(self.refuse(point) for point in points):
            raise Rejected("INVALID_PARAMETER_VALUE")
        self.points.extend(points)
        self._answer()

    def log_params(self, run_id: str, params: dict[str, str]) -> None:
        self._request()
        for name, value in params.items():
            assert self.params.setdefault(name, value) == value, "params are immutable"
        self._answer()

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self._request()
        self.tags.update(tags)

    def log_datasets(self, run_id: str, datasets: Sequence[dict[str, Any]]) -> None:
        self._request()
        self.datasets = list(datasets)

    def log_text(self, run_id: str, text: str, artifact: str) -> None:
        self._request()
        self.artifacts[artifact] = text

    def log_path(self, run_id: str, path: Path, artifact_dir: str | None, exclude: Sequence[str] = ()) -> None:
        self._request()
        if not path.exists():
            raise Rejected(f"{path} does not exist")
        self.artifacts[artifact_dir or path.name] = str(path)
        self._answer()

    def log_table(self, run_id: str, path: Path) -> None:
        self._request()
        self.artifacts[path.name] = json.loads(path.read_text())

    def log_trace(self, run_id: str, trace: dict[str, Any]) -> None:
        self._request()
        if self.refuse_traces:
            raise RuntimeError("500 Internal Server Error")
        self.traces[trace["id"]] = trace
        self._answer()

    def register_model(self, run_id: str, name: str, artifact_dir: str, key: str, tags: dict[str, str]) -> str:
        self._request()
        version = self.versions.setdefault(key, str(len(self.versions) + 1))
        self._answer()
        return version

    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None:
        self._request()
        self.statuses.append(status)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Every stored value of a metric, in the order of arrival."""
        return [(point.step, point.value) for point in self.points if point.name == name]
