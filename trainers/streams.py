"""Datasets that are read as a stream: in their own order, row by row, never whole in memory. No torch, no `datasets` here.

    Stream.open(epoch) ─▶ a copy of the dataset, told its epoch ─▶ rows

Every pass reads a copy of its own, so that one pass leaves nothing behind for the next. The copies are made by pickle, by which
the dataset came here anyway: `copy.deepcopy` of a streaming dataset fails in a thread that never opened its file system.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from trainers.errors import DatasetError

FINGERPRINT_ROWS = 32


def is_stream(rows: Any) -> bool:
    """Whether `rows` can be gone through, but has no length or cannot be asked for row i."""
    named = any(base.__name__ == "IterableDataset" for base in type(rows).__mro__)  # its base class has a `__getitem__`
    return hasattr(rows, "__iter__") and (named or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")))


def row_bytes(row: dict[str, Any]) -> bytes:
    """One row's content, to be hashed."""
    return json.dumps(row, default=str, sort_keys=True, ensure_ascii=False).encode()


def row_digest(row: dict[str, Any]) -> str:
    """Hash of one row's content."""
    return hashlib.sha256(row_bytes(row)).hexdigest()[:16]


def require_columns(source: str, present: list[str], wanted: Iterable[str]) -> None:
    """Raises `DatasetError` naming the missing column and those that exist."""
    for column in wanted:
        if column not in present:
            raise DatasetError(
                f"{source} has no column `{column}`; it has: {', '.join(present)}. Name the right one with "
                "`dataset.prompt_column` or `dataset.completion_column`, or add it to the data"
            )


class Stream:
    """A dataset without length: `datasets.IterableDataset`, or any object whose `__iter__` begins a new pass over dicts.

    Where the dataset has them, `set_epoch(epoch)` is called before each pass, and `state_dict()` and `load_state_dict()` make a
    resumed run go on where it was.

    Args:
        rows: the dataset.
        source: what to call it in messages.
        max_rows: end each pass after this many.

    Raises:
        DatasetError: it can be read only once, or has no rows.
        TypeError: it cannot be pickled.
    """

    cut_by = ""  # see `Rows`

    def __init__(self, rows: Any, source: str, max_rows: int | None = None) -> None:
        if iter(rows) is rows:
            raise DatasetError(
                f"{source} is a {type(rows).__name__}, which can be read only once: pass an object whose `__iter__` begins "
                "anew, such as a datasets.IterableDataset"
            )
        try:
            self._pickled = pickle.dumps(rows)
        except Exception as error:
            raise TypeError(
                f"{source} cannot be handed to the process that reads it ({error}): what it is made of must be defined at the "
                "top level of a module or script, not as a lambda or within a function"
            ) from error
        # Whether a pass can be gone on with.
        self.stateful = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")
        self._features = str(getattr(rows, "features", None))
        self.source = source
        self.max_rows = max_rows
        names = getattr(rows, "column_names", None)
        self.columns: list[str] = list(names) if names else list(self._first_rows(1)[0])

    def open(self, epoch: int) -> Any:
        """The dataset of one pass, not begun."""
        rows = pickle.loads(self._pickled)
        if hasattr(rows, "set_epoch"):
            rows.set_epoch(epoch)
        return rows

    def rows(self, opened: Any, epoch: int, position: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of an opened pass; `position` is that of the first one.

        Raises:
            DatasetError: reading failed, or a row is no dict; the message says where.
        """
        try:
            for row in opened:
                if self.max_rows is not None and position >= self.max_rows:
                    return
                if not isinstance(row, Mapping):
                    raise DatasetError(
                        f"{self.source}, row {position}: a {type(row).__name__}, but every row must be a dict of columns"
                    )
                yield dict(row)
                position += 1
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(
                f"{self.source} could not be read on at row {position} of epoch {epoch}: {type(error).__name__}: {error}"
            ) from error

    def _first_rows(self, count: int) -> list[dict[str, Any]]:
        rows = list(itertools.islice(self.rows(self.open(0), 0), count))
        if not rows:
            raise DatasetError(f"{self.source} has no rows")
        return rows

    def require(self, *columns: str) -> None:
        """Raises `DatasetError` naming the missing column and those that exist."""
        require_columns(self.source, self.columns, columns)

    @cached_property
    def _fingerprint(self) -> str:
        features = [self._features, self.columns, self.max_rows]
        return row_digest({"stream": features, "rows": self._first_rows(FINGERPRINT_ROWS)})

    def fingerprint(self) -> str:
        """Hash of features, columns and the first 32 rows: more would have to be read before anything starts."""
        return self._fingerprint
