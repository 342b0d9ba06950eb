"""`log_completions`: a step's completions as a table for the terminal or a log file.

The rows are those of `trainers.rollouts.inspection`. Printing never fails for what a model wrote: control characters are
replaced, and what the stream cannot encode as well.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TextIO

from trainers.rollouts.trace import cut

MAX_CHARS = 600  # of a prompt or completion
LOG_WIDTH = 140  # columns where there is no terminal


def print_completions(rows: Sequence[dict[str, Any]], stream: TextIO) -> None:
    """Write the table: in colour to a terminal and as wide as it is, else as plain characters."""
    text = _render(rows, terminal=stream.isatty())
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, errors="replace").decode(encoding))
    stream.flush()


def _render(rows: Sequence[dict[str, Any]], terminal: bool) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=None if terminal else LOG_WIDTH)
    table = Table(
        title=f"Step {rows[0]['step']}",
        box=box.ROUNDED if terminal else box.ASCII,
        show_lines=True,
        expand=True,
        title_justify="left",
    )
    table.add_column("Prompt", style="yellow", ratio=1, overflow="fold")
    table.add_column("Completion", style="green", ratio=2, overflow="fold")
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("rewards/")))
    for name in [*names, "reward", "advantage"]:
        table.add_column(name.removeprefix("rewards/"), style="cyan", justify="right", overflow="fold")
    for row in rows:
        texts = [Text(_printable(row[name])) for name in ("prompt", "completion")]
        table.add_row(*texts, *(_number(row.get(name)) for name in [*names, "reward", "advantage"]))
    console.print(table)
    return printed.getvalue()


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() or char == "\n" else " " if char == "\t" else "\N{REPLACEMENT CHARACTER}"
        for char in cut(text, MAX_CHARS)
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
