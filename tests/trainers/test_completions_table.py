"""The table of `log_completions`, on a terminal, in a log file, and where the loop prints it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_source import FakeSource
from tests.trainers.test_loop import Sink, make_loop
from trainers.completions_table import LOG_WIDTH, MAX_CHARS, print_completions


def row(step: int = 3, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step,
        "prompt": "What is 2+2?",
        "completion": "4",
        "rewards/accuracy": 1.0,
        "reward": 1.0,
        "advantage": -0.7,
    }
    return values | changes


def printed(*rows: dict[str, Any]) -> str:
    stream = io.StringIO()
    print_completions(rows, stream)
    return stream.getvalue()


def cells(text: str, line: int) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[line].strip("|").split("|")]


def test_a_log_file_gets_plain_characters_and_a_column_per_reward() -> None:
    text = printed(row(), row(**{"rewards/style": None, "reward": None, "advantage": 0.0}))
    assert text.splitlines()[0].strip() == "Step 3" and "\x1b" not in text
    assert all(len(line) <= LOG_WIDTH for line in text.splitlines())
    assert cells(text, 2) == ["Prompt", "Completion", "accuracy", "style", "reward", "advantage"]
    assert cells(text, 4) == ["What is 2+2?", "4", "1.00", "–", "1.00", "-0.70"]
    assert cells(text, 6) == ["What is 2+2?", "4", "1.00", "–", "–", "0.00"]


def test_tool_calls_stay_in_their_lines_and_markup_is_text() -> None:
    text = printed(row(completion='[bold]see[/bold]\n→ calculator {"a": 1}\n← calculator: 4\nIt is 4.'))
    assert [cells(text, line)[1] for line in range(4, 8)] == [
        "[bold]see[/bold]",
        '→ calculator {"a": 1}',
        "← calculator: 4",
        "It is 4.",
    ]


def test_long_texts_are_cut_and_what_a_terminal_would_obey_is_replaced() -> None:
    text = printed(row(prompt="ß" * 5000, completion="a\x1b[31mred\x07\tb"))
    assert text.count("ß") == MAX_CHARS and "(5000" in text
    assert "\x1b" not in text and "a\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} b" in text


def test_a_terminal_gets_colours() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    print_completions([row()], stream)
    assert "\x1b[" in stream.getvalue() and "╭" in stream.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_that_cannot_write_a_character_gets_another(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_completions([row(completion="→ 语 \ud800 end")], stream)
    stream.seek(0)
    assert "end" in stream.read()


def test_the_loop_prints_the_logged_steps_own_completions_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Telling(FakeSource):
        def drain_rollouts(self) -> list[dict[str, Any]]:
            return [row(self.done, completion=f"completion of {self.done}"), row(self.done, completion="kept", trace={})]

    sink = Sink()
    make_loop(tmp_path, Telling(), sink=sink, max_steps=4, logging_steps=2).run()
    text = capsys.readouterr().out
    assert [line.strip() for line in text.splitlines() if line.startswith("Step")] == ["Step 2", "Step 4"]
    assert "completion of 2" in text and "completion of 4" in text and "completion of 3" not in text and "kept" not in text
    assert [event for event in sink.events if event[0] == "rollouts"] == [("rollouts", step, 1) for step in (1, 2, 3, 4)]
