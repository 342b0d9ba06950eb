"""The long-context benchmark's rows: figures, refusals, peers beside, and the search for the longest that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.long_context import longest, measure


def test_a_row_has_its_figures():
    row = measure("tiny", 64, ["offload", "save_attention", "tile"], 1, None, False)
    assert "failed" not in row and row["perf/step_s"] > 0
    assert (row["tokens"], row["layers"], row["parameters"]) == (64, 2, 82368)
    assert row["loss"] == pytest.approx(4.85, abs=0.2), "random weights: the logarithm of 128 ids"
    short = measure("tiny", 64, [], 0, 1, False)
    assert short["layers"] == 1 and short["parameters"] < row["parameters"]


def test_a_row_that_cannot_be_is_a_row_too():
    row = measure("tiny", 1 << 42, ["offload"], 0, None, False)
    assert row["failed"] == "refused" and "GiB in host memory" in row["error"]
    with pytest.raises(SystemExit, match="no lever 'tiles'"):
        measure("tiny", 64, ["tiles"], 0, None, False)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["hf", "trl"])
def test_a_peer_has_the_same_figures(peer):
    """In a process of its own, as the benchmark runs it."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.long_context",
        "--shape",
        "tiny",
        "--one",
        "--runs",
        f"64:{peer}",
    ]
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=560)
    row = json.loads(done.stdout.splitlines()[-1])
    assert "failed" not in row and row["perf/step_s"] > 0 and row["peer"].split()[-1].endswith("Trainer")
    assert row["loss"] == pytest.approx(4.85, abs=0.2)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (500, {"tokens": 400, "did_not_fit": 800}),
        (99, {"tokens": 0, "did_not_fit": 100}),
        (9999, {"tokens": 800, "did_not_fit": None}),
    ],
)
def test_the_longest_that_fits(limit, said):
    tried = []

    def run(tokens: int) -> dict[str, Any]:
        tried.append(tokens)
        return {"tokens": tokens} | ({} if tokens <= limit else {"failed": "out of memory"})

    rows = list(longest(run, "offload", 100, 1000))
    assert rows[-1] == {"longest": "offload", **said}
    assert [row["tokens"] for row in rows[:-1]] == tried == [100, 200, 400, 800][: len(tried)]
