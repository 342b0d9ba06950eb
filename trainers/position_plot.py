"""Loss against position as a table and a picture: where a run loses the thread of a long sequence.

    tokens' losses ─▶ bins of equal length ─▶ loss_by_position.csv ─▶ loss_by_position.png

`python -m trainers.position_plot OUT.png LABEL=TABLE.csv…` draws the tables of several runs into one picture.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainers.errors import ConfigError

logger = logging.getLogger(__name__)


class Bin(NamedTuple):
    """Tokens at positions `first` … `last` of their sequence, and their mean loss in nats."""

    first: int
    last: int
    tokens: int
    loss: float


def bins_of(totals: Sequence[Sequence[float]], edges: Sequence[int]) -> list[Bin]:
    """The bins that have a token. `totals`: summed loss, tokens; bin i holds positions `edges[i]` … `edges[i + 1]` − 1."""
    sums, counts = totals
    return [
        Bin(edges[i], edges[i + 1] - 1, int(count), total / count)
        for i, (total, count) in enumerate(zip(sums, counts, strict=True))
        if count
    ]


def write_table(path: Path, rows: Iterable[Sequence[object]], columns: Sequence[str]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(rows)


def read_table(path: Path) -> list[Bin]:
    """The table of an evaluation. Raises `ConfigError` for another file."""
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            rows = [Bin(int(r["first"]), int(r["last"]), int(r["tokens"]), float(r["loss"])) for r in csv.DictReader(stream)]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no table of losses by position ({error}): give a loss_by_position.csv") from error
    if not rows:
        raise ConfigError(f"{path} has no positions")
    return rows


def draw(curves: Mapping[str, Sequence[Bin]], path: Path, trained_window: int | None = None) -> bool:
    """Write a PNG with one curve per label; a dashed line where the window ends that the model was trained for.

    Returns:
        False: matplotlib is not installed, and a warning says so.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("%s is not drawn: matplotlib is not installed; the table is beside it", path)
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, bins in curves.items():
        axes.plot([(one.first + one.last) / 2 for one in bins], [one.loss for one in bins], label=label, linewidth=1.5)
    longest = max(bins[-1].last for bins in curves.values())
    if trained_window is not None and trained_window < longest:
        axes.axvline(trained_window, color="grey", linestyle="--", linewidth=1, label=f"trained window {trained_window:,}")
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(0, longest)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def main(arguments: Sequence[str]) -> int:
    pairs = [argument.partition("=") for argument in arguments[1:]]
    if not pairs or any(not mark for _, mark, _ in pairs):
        print("usage: python -m trainers.position_plot OUT.png LABEL=TABLE.csv…", file=sys.stderr)
        return 2
    try:
        drawn = draw({label: read_table(Path(file)) for label, _, file in pairs}, Path(arguments[0]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
