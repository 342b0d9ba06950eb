"""Where books come from: a folder of .txt files, a .jsonl file, or rows with a text column. NumPy only.

Every source answers `len` and `text(i)`, and reads one text at a time. `stamp` changes whenever a text may have changed and
costs no reading; None: only reading tells.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainers.config_parts import DatasetConfig
from trainers.data import Rows, load_rows
from trainers.errors import DatasetError


class Texts(Protocol):
    """The texts of a dataset, in order."""

    source: str  # what to call it in messages
    stamp: str | None

    def __len__(self) -> int: ...
    def text(self, index: int) -> str:
        """Raises `DatasetError` where it cannot be read."""
        ...


def open_texts(dataset: DatasetConfig, column: str, given: Any = None) -> Texts:
    """The texts of `dataset`, or of rows `given` as a Python object.

    Raises:
        DatasetError: there are none, or they have no such column.
    """
    if given is not None:
        return TextRows(Rows(given, "train_dataset", dataset.max_rows), column)
    path = Path(dataset.path).expanduser()
    if path.is_dir() and not any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return TextFolder(path, dataset.max_rows)
    if path.suffix == ".txt":
        return TextFolder(path, dataset.max_rows)
    if path.suffix == ".jsonl" and path.is_file():
        return TextLines(path, column, dataset.max_rows)
    stamp = json.dumps([str(path.absolute()), *_stat(path), column, dataset.max_rows]) if path.is_file() else None
    return TextRows(load_rows(dataset), column, stamp)


class TextFolder:
    """The .txt files below a folder, UTF-8, one book each, in the order of their names; or a single file."""

    def __init__(self, path: Path, most: int | None) -> None:
        self.source = f"folder {path}"
        if not path.exists():
            raise DatasetError(f"there is no {path.absolute()}: give a .txt file, or a folder with one book per file")
        self._files = [path] if path.is_file() else sorted(file for file in path.rglob("*.txt") if not file.is_dir())[:most]
        if not self._files:
            raise DatasetError(f"{path} has no .txt files: give a folder with one book per file, or a file with a text column")
        self.stamp: str | None = json.dumps([[str(file.absolute()), *_stat(file)] for file in self._files])

    def __len__(self) -> int:
        return len(self._files)

    def text(self, index: int) -> str:
        file = self._files[index]
        try:
            return file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DatasetError(f"{file} is not UTF-8 at byte {error.start}: convert it, or take it out") from error
        except OSError as error:
            raise DatasetError(f"{file} cannot be read: {error.strerror}") from error


class TextLines:
    """One column of a .jsonl file; a line is read when it is asked for."""

    def __init__(self, path: Path, column: str, most: int | None) -> None:
        self.source, self._path, self._column = f"file {path}", path, column
        self.stamp: str | None = json.dumps([str(path.absolute()), *_stat(path), column, most])
        starts = array("q")
        with open(path, "rb") as stream:
            at = 0
            for line in stream:
                if line.strip():
                    starts.append(at)
                    if most is not None and len(starts) == most:
                        break
                at += len(line)
        self._starts = np.array(starts, np.int64)
        if not len(self._starts):
            raise DatasetError(f"{path} has no rows")
        self.text(0)  # a column that is not there is said before anything is waited for

    def __len__(self) -> int:
        return len(self._starts)

    def text(self, index: int) -> str:
        try:
            with open(self._path, "rb") as stream:
                stream.seek(int(self._starts[index]))
                row = json.loads(stream.readline())
        except (OSError, ValueError) as error:
            raise DatasetError(f"{self._path}, row {index + 1}: {error}") from error
        return _text_of(row, self._column, f"{self._path}, row {index + 1}")


class TextRows:
    """One column of rows that have a length: a parquet file, a saved dataset, a hub id, a list of dicts."""

    def __init__(self, rows: Rows, column: str, stamp: str | None = None) -> None:
        if column not in rows.columns:
            raise DatasetError(
                f"{rows.source} has no column `{column}`; it has: {', '.join(rows.columns)}. Name the one with the texts in "
                "`books.text_column`"
            )
        self.source, self.stamp = rows.source, stamp
        self._rows, self._column = rows, column

    def __len__(self) -> int:
        return len(self._rows)

    def text(self, index: int) -> str:
        return _text_of(self._rows[index], self._column, f"{self.source}, row {index + 1}")


def _text_of(row: Any, column: str, where: str) -> str:
    value = row.get(column) if isinstance(row, dict) else None
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DatasetError(
                f"{where}: `{column}` has half of a surrogate pair at character {error.start + 1}, which no tokenizer takes: "
                "mend it, or take the row out"
            ) from error
        return value
    has = f"it has: {', '.join(map(str, row))}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
    what = f"`{column}` holds a {type(value).__name__}" if value is not None else f"there is no `{column}`; {has}"
    raise DatasetError(f"{where}: {what}. Every row needs a text there (`books.text_column` names the column)")


def _stat(path: Path) -> tuple[int, int]:
    """Size and time of change. Raises `DatasetError`: it cannot be opened, as behind a broken link."""
    try:
        with open(path, "rb") as stream:
            stat = os.fstat(stream.fileno())
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}; mend it, or take it out") from error
    return stat.st_size, stat.st_mtime_ns
