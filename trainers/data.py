"""Datasets: rows, fingerprint, prompts as token ids, recorded completions. No torch; `datasets` only for what needs it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainers.config import DistillationConfig, SFTConfig, TrainerConfig
from trainers.config_parts import DatasetConfig
from trainers.errors import ConfigError, DatasetError
from trainers.rollouts.chat import Chat
from trainers.routing import TEACHER_COLUMN, check_teachers, teacher_of
from trainers.streams import Stream, is_stream, require_columns, row_bytes
from trainers.types import Message, Prompt

_FINGERPRINT_ROWS = 100_000
_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # and what `datasets` calls their format


class Rows:
    """A finite dataset: `len`, `[i] → dict`, column names.

    Args:
        rows: a list of dicts, a `datasets.Dataset`, or anything else with `__len__` and `__getitem__` giving dicts.
        source: what to call it in messages.
    """

    cut_by = ""  # options that the rows are made with

    def __init__(self, rows: Any, source: str, max_rows: int | None = None) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise DatasetError(f"{source} is a {type(rows).__name__} without a length: pass a Dataset or a list of dicts")
        self._rows = rows
        self.source = source
        self._length = min(len(rows), max_rows or len(rows))
        if self._length == 0:
            raise DatasetError(f"{source} has no rows")
        self.columns: list[str] = list(getattr(rows, "column_names", None) or rows[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column, None where a row has none."""
        rows: Any = self._rows
        whole: Iterable[Any] = rows[name] if hasattr(rows, "column_names") else (self[i].get(name) for i in range(len(self)))
        yield from itertools.islice(whole, len(self))

    def require(self, *columns: str) -> None:
        """Raises `DatasetError` naming the missing column and those that exist."""
        require_columns(self.source, self.columns, columns)

    def fingerprint(self) -> str:
        """Hash of the content: length, columns and rows (beyond 100,000 rows, that many at even distances)."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([len(self), self.columns]).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, min(len(self), _FINGERPRINT_ROWS)).astype(np.int64)).tolist():
            digest.update(row_bytes(self[index]))
        return digest.hexdigest()[:16]


def as_data(rows: Any, source: str, max_rows: int | None = None) -> Rows | Stream:
    """Rows given as a Python object; what has no length is a stream."""
    return Stream(rows, source, max_rows) if is_stream(rows) else Rows(rows, source, max_rows)


def load_data(config: DatasetConfig) -> Rows | Stream:
    """Open the dataset of a config, as a stream if it says so.

    Raises:
        DatasetError: it does not exist, cannot be read, or is empty.
    """
    if not config.streaming:
        return load_rows(config)
    return Stream(_opened(config, _stream_of), f"dataset `{config.path}`", config.max_rows)


def load_rows(config: DatasetConfig) -> Rows:
    """Open the dataset of a config, whole. Raises as `load_data` does."""
    return Rows(_opened(config, _rows_of), f"dataset `{config.path}`", config.max_rows)


def _opened(config: DatasetConfig, way: Callable[[Path, DatasetConfig], Any]) -> Any:
    path = Path(config.path).expanduser()
    try:
        if path.suffix in _FILES and not path.is_file():
            raise DatasetError(f"there is no file {path.absolute()}")
        return way(path, config)
    except DatasetError:
        raise
    except Exception as error:
        here = "" if path.exists() else f", and there is no {path.absolute()}"
        kinds = f"; of files, {', '.join(_FILES)} are read" if path.is_file() and path.suffix not in _FILES else ""
        raise DatasetError(f"cannot read dataset `{config.path}`{here}: {type(error).__name__}: {error}{kinds}") from error


def _stream_of(path: Path, config: DatasetConfig) -> Any:
    import datasets

    datasets.disable_progress_bars()
    if path.suffix in _FILES:
        return datasets.load_dataset(_FILES[path.suffix], data_files=str(path), split="train", streaming=True)
    if _saved_to_disk(path):
        return _load_with_datasets(path, config).to_iterable_dataset()
    return datasets.load_dataset(config.path, split=config.split, streaming=True)


def _rows_of(path: Path, config: DatasetConfig) -> Any:
    return _read_json(path) if path.suffix in (".jsonl", ".json") else _load_with_datasets(path, config)


def _read_json(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise DatasetError(f"{path} holds a {type(rows).__name__}: it must be a list of objects")
    else:
        rows = []
        # Not splitlines: a JSON string may hold U+2028 or U+0085, where that would cut it.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise DatasetError(f"{path}, line {number}: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, row {number}: a {type(row).__name__}, but every row must be an object")
    return rows


def _load_with_datasets(path: Path, config: DatasetConfig) -> Any:
    import datasets

    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path))
    if _saved_to_disk(path):
        loaded = datasets.load_from_disk(str(path))
        return loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
    return datasets.load_dataset(config.path, split=config.split)


def _saved_to_disk(path: Path) -> bool:
    return path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists())


def check_columns(rows: Rows | Stream, config: TrainerConfig) -> None:
    """The columns the algorithm needs are there. Raises `DatasetError`."""
    rows.require(*needed_columns(config))
    if isinstance(config, DistillationConfig):
        check_teachers(rows.source, rows.columns, teacher_names(rows), config.teachers)


def needed_columns(config: TrainerConfig) -> list[str]:
    """Of the dataset, whatever rewards need beside. Books have their own check, when their texts are read."""
    dataset = config.dataset
    if isinstance(config, SFTConfig):
        if config.books is not None:
            return []
        return (
            [dataset.prompt_column, dataset.completion_column] if dataset.messages_column is None else [dataset.messages_column]
        )
    return [] if _environment_asks(config) else [dataset.prompt_column]


def teacher_names(rows: Rows | Stream) -> Iterable[Any]:
    """The column `teacher_id`; nothing of a stream, whose rows are looked at as they come."""
    return rows.column(TEACHER_COLUMN) if isinstance(rows, Rows) else ()


def _environment_asks(config: TrainerConfig) -> bool:
    """What the model is shown may come from an environment's `reset` alone; a prompt column is then not needed."""
    return getattr(config, "environment_factory", None) is not None


def load_tokenizer(config: TrainerConfig) -> Any:
    """The model's tokenizer.

    Raises:
        ConfigError: the model folder or hub id has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a tokenizer from model `{config.model}`: {str(error).splitlines()[0]}") from error


class PromptBuilder:
    """Dataset rows to prompts and recorded completions, by the tokenizer's chat template (or plain text without one).

    Args:
        held_out: they are evaluated on, so that no teacher scores them.
    """

    def __init__(
        self, tokenizer: Any, config: TrainerConfig, tools: Sequence[dict[str, Any]] = (), held_out: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, config.chat_template_kwargs, tools)
        self._dataset = config.dataset
        self._may_be_empty = _environment_asks(config)
        self._teachers = config.teachers if isinstance(config, DistillationConfig) and not held_out else ()

    def messages(self, row: dict[str, Any]) -> list[Message]:
        """The row's prompt as chat messages, system prompt first."""
        column = self._dataset.prompt_column
        prompt = "" if self._may_be_empty and column not in row else row[column]
        messages = self._as_messages(prompt, "user", column)
        if self._dataset.system_prompt is not None:
            messages = [{"role": "system", "content": self._dataset.system_prompt}, *messages]
        return messages

    @staticmethod
    def _as_messages(value: Any, role: str, column: str) -> list[Message]:
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        if isinstance(value, list) and value and all(isinstance(message, dict) and "role" in message for message in value):
            return [dict(message) for message in value]
        raise DatasetError(f"column `{column}` holds {value!r:.80}: it must be a string or a non-empty list of chat messages")

    def prompt(self, epoch: int, row_index: int, row: dict[str, Any]) -> Prompt:
        messages = self.messages(row)
        if self._teachers:
            teacher_of(row, row_index, self._teachers)  # of a stream, a row's is only known now
        columns = {name: value for name, value in row.items() if name != self._dataset.prompt_column}
        return Prompt(epoch, row_index, messages, columns, self.chat.prompt_ids(messages), row)

    def completion_ids(self, prompt: Prompt, row: dict[str, Any]) -> tuple[list[Message], np.ndarray]:
        """The recorded completion: messages, and int32 [O] ids that follow the prompt's, up to and with its end of turn.

        Tokenized apart from the prompt, so that the boundary is the one generation sees.

        Raises:
            DatasetError: the chat template renders the prompt differently once an answer follows.
        """
        column = self._dataset.completion_column
        completion = self._as_messages(row[column], "assistant", column)
        before = self.chat.render(prompt.messages)
        after = self.chat.render([*prompt.messages, *completion], generation=False)
        if not after.startswith(before):
            raise DatasetError(
                "the chat template does not render the prompt as a prefix of prompt and completion, so the completion cannot "
                "be told apart; use a template whose generation prompt is how an assistant message begins"
            )
        ids: list[int] = self.tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
        return completion, np.array(self._ended(ids), dtype=np.int32)

    def _ended(self, ids: list[int]) -> list[int]:
        """Cut what a template writes after the last end of turn (a newline, mostly); add EOS where there is no end of turn."""
        eos = self.tokenizer.eos_token_id
        if eos in ids:
            return ids[: len(ids) - ids[::-1].index(eos)]
        special = set(self.tokenizer.all_special_ids) if self.chat.has_template else set()
        end = len(ids)
        while end and ids[end - 1] not in special and not self.tokenizer.decode([ids[end - 1]]).strip():
            end -= 1
        if end and ids[end - 1] in special:
            return ids[:end]
        return ids if eos is None else [*ids, eos]
