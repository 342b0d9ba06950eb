"""Columns of text on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import click


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns set out with spaces; the last one is not padded."""
    if not rows:
        return
    # One long value (a system prompt) must not push every source off the screen.
    widths = [min(48, max(len(row[column]) for row in rows)) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]))
