"""The table of rollouts: bounded, and over the whole run. How the tracker fills it: `test_tracking.py`."""

from __future__ import annotations

import json
from pathlib import Path

from infra.rollout_table import MAX_ROWS_PER_STEP, MAX_TEXT_CHARS, RolloutTable, bounded_rows, evenly


def test_the_table_is_bounded_and_spans_the_run(tmp_path: Path) -> None:
    rows = bounded_rows(evenly([{"completion": "x" * 5000, "n": n} for n in range(1000)]))
    assert len(rows) <= MAX_ROWS_PER_STEP and rows[0]["n"] == 0 and rows[-1]["n"] > 900
    assert len(rows[0]["completion"]) < MAX_TEXT_CHARS + 30
    assert bounded_rows([{"n": 1}]) == [{"n": 1}]
    table = RolloutTable(tmp_path / "rollouts.json", max_rows=40)
    for step in range(1, 1001):
        table.put(step, [{"n": step}, {"n": -step}])
        table.put(step, [{"n": step}, {"n": -step}])  # repeated: no change
    table.save()
    kept = sorted({row[0] for row in json.loads((tmp_path / "rollouts.json").read_text())["data"]})
    assert len(kept) <= 20 and kept[-1] == 1000 and kept[0] < 250
    again = RolloutTable(tmp_path / "rollouts.json", max_rows=40)
    again.drop_after(500)
    again.save()
    assert {row[0] for row in json.loads((tmp_path / "rollouts.json").read_text())["data"]} == {
        step for step in kept if step <= 500
    }
