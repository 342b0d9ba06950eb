"""The rollouts table: a bounded sample of what the policy wrote, as the file that `mlflow.log_table` would have made.

Kept whole on local disk and uploaded whole, so that an upload repeated after a crash changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.outbox import write_atomically

ARTIFACT = "rollouts.json"
MAX_ROWS = 2000
MAX_ROWS_PER_STEP = 64
MAX_TEXT_CHARS = 2000


def evenly(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evenly chosen rows of one step, at most `MAX_ROWS_PER_STEP`."""
    return rows[:: -(-len(rows) // MAX_ROWS_PER_STEP) or 1]


def bounded_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows' cells: long texts cut, what is no number made text, traces left out."""
    return [{str(key): _cell(value) for key, value in row.items() if key != "trace"} for row in rows]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}… ({len(text)} characters)"


class RolloutTable:
    """Rows by step. Over `max_rows`, steps off a growing stride go first, so that the table keeps spanning the whole run."""

    def __init__(self, path: Path, max_rows: int = MAX_ROWS) -> None:
        self.path = path
        self.max_rows = max_rows
        self._steps: dict[int, list[dict[str, Any]]] = {}
        if path.exists():
            table = json.loads(path.read_text())
            for cells in table["data"]:
                row = dict(zip(table["columns"], cells, strict=True))
                self._steps.setdefault(row["step"], []).append(row)

    def put(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Set the rows of a step; the same call again changes nothing."""
        self._steps[step] = [{"step": step, **row} for row in rows]
        newest, stride = max(self._steps), 1
        while sum(map(len, self._steps.values())) > self.max_rows and len(self._steps) > 1:
            stride *= 2
            self._steps = {kept: rows for kept, rows in self._steps.items() if kept % stride == 0 or kept == newest}

    def drop_after(self, step: int) -> None:
        """A resumed run trains the later steps again."""
        self._steps = {kept: rows for kept, rows in self._steps.items() if kept <= step}

    def save(self) -> None:
        """Write the file: pandas' `split` layout, `{"columns": […], "data": [[…], …]}`."""
        rows = [row for step in sorted(self._steps) for row in self._steps[step]]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        write_atomically(self.path, json.dumps({"columns": columns, "data": data}, ensure_ascii=False).encode())
