"""Which teacher scores a row: the column `teacher_id`, where there are several teachers. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainers.errors import DatasetError

TEACHER_COLUMN = "teacher_id"


def teacher_of(row: Mapping[str, Any], number: int, teachers: Sequence[str]) -> str:
    """The teacher of row `number`; a single teacher has every row.

    Raises:
        DatasetError: the row names none of `teachers`.
    """
    if len(teachers) == 1:
        return teachers[0]
    if (name := row.get(TEACHER_COLUMN)) not in teachers:
        raise _unknown(number, name, teachers)
    return str(name)


def check_teachers(source: str, columns: Sequence[str], values: Iterable[Any], teachers: Sequence[str]) -> None:
    """A dataset names a teacher in every row.

    Args:
        source: what to call it.
        values: its column `teacher_id`, read only if it has one; empty for a stream, whose rows are checked as they come.

    Raises:
        DatasetError: it has no such column, or the first row that names none, and the teachers there are.
    """
    if len(teachers) == 1:
        return
    if TEACHER_COLUMN not in columns:
        raise DatasetError(
            f"{source} has no column `{TEACHER_COLUMN}`; it has: {', '.join(columns)}. With several teachers each row must "
            f"name its own: {', '.join(teachers)}"
        )
    for number, name in enumerate(values):
        if name not in teachers:  # no set: a value may be a list
            raise _unknown(number, name, teachers)


def _unknown(number: int, name: Any, teachers: Sequence[str]) -> DatasetError:
    given = f"has no `{TEACHER_COLUMN}`" if name is None else f"has `{TEACHER_COLUMN}` {name!r}"
    return DatasetError(f"row {number} of the dataset {given}: name one of the teachers {', '.join(teachers)}")
