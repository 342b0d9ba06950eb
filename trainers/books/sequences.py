"""Books joined end to end and cut into sequences: what a run reads as its dataset. NumPy only.

    shards: book │ book │ book …  = one line of N tokens ─▶ sequence i: tokens [i·L, (i + 1)·L), at most L

A sequence is a dict of arrays: `token_ids` int32 [L], and `book_positions` int32 [L], the number of tokens of its own book that
come before each (0: a book starts there). With L = 4, books of 3 and 6 tokens (end of text included) give the positions
[0, 1, 2, 0], [1, 2, 3, 4], [5]. The last sequence is the shorter one: kept as it is, or dropped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainers.books.cache import Shard, default_folder, make_plan, open_shards
from trainers.books.texts import open_texts
from trainers.config_parts import DatasetConfig
from trainers.config_sft import BooksConfig
from trainers.data import Rows
from trainers.errors import DatasetError

logger = logging.getLogger(__name__)
TOKENS, POSITIONS = "token_ids", "book_positions"


class Books(Rows):
    """Sequences of `length` tokens. Rows as any other dataset's, read from the token cache when asked for.

    Args:
        shards: the tokens, in order.
        content: hash of tokenizer and texts.
        drop_last: leave the tokens at the end out that do not fill a sequence.

    Raises:
        DatasetError: there is no sequence to train on.
    """

    cut_by = "max_length, books.last_sequence or the tokenizer"

    def __init__(self, shards: Sequence[Shard], content: str, length: int, source: str, drop_last: bool = False) -> None:
        self.source, self.length = source, length
        self.columns = [TOKENS, POSITIONS]
        self._shards = list(shards)
        self._shard_starts = np.cumsum([0, *(shard.size for shard in shards)])
        self.tokens = int(self._shard_starts[-1])
        lengths = np.concatenate([np.zeros(0, np.int64), *(shard.lengths for shard in shards)])
        self._book_starts = (np.cumsum(lengths) - lengths)[lengths > 0]
        whole, self.left_over = divmod(self.tokens, length)
        # One token alone has nothing to predict.
        self.dropped_tokens = self.left_over if drop_last or self.left_over == 1 else 0
        self._length = whole + (self.left_over > self.dropped_tokens)
        self._content = content
        if not self._length:
            remedy = (
                "give texts with words in them" if self.tokens < 2 else "shorten max_length, or set books.last_sequence=keep"
            )
            raise DatasetError(f"{source} has {self.tokens} tokens: not one sequence of max_length={length}; {remedy}")

    @property
    def books(self) -> int:
        """Texts that have a token."""
        return len(self._book_starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"sequence {index} of {self._length}")
        start, stop = index * self.length, min((index + 1) * self.length, self.tokens)
        first, last = np.searchsorted(self._shard_starts, [start, stop - 1], side="right") - 1
        parts = [
            self._shards[i].read(max(start - self._shard_starts[i], 0), min(stop - self._shard_starts[i], self._shards[i].size))
            for i in range(first, last + 1)
        ]
        return {TOKENS: np.concatenate(parts), POSITIONS: self._positions(start, stop)}

    def _positions(self, start: int, stop: int) -> np.ndarray:
        first, after = np.searchsorted(self._book_starts, [start, stop - 1], side="right") - [1, 0]
        begins = self._book_starts[first:after]
        ends = np.append(np.maximum(begins[1:], start), stop)
        return (np.arange(start, stop) - np.repeat(begins, ends - np.maximum(begins, start))).astype(np.int32)

    def fingerprint(self) -> str:
        """Hash of tokenizer, texts, and how they are cut."""
        cut = f"{self._content}:{self.length}:{self.dropped_tokens}"
        return hashlib.sha256(cut.encode()).hexdigest()[:16]


def open_books(
    books: BooksConfig,
    dataset: DatasetConfig,
    tokenizer: Any,
    max_length: int,
    *,
    given: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Books:
    """The texts of `dataset` (or of rows `given`) as sequences; what is not in the token cache is tokenized first.

    Raises:
        DatasetError: a text cannot be read, there is none, or the cache cannot be written.
    """
    texts = open_texts(dataset, books.text_column, given)
    folder = _folder(books)
    shards, content = open_shards(texts, tokenizer, folder, books.workers, say)
    made = Books(shards, content, max_length, texts.source, books.last_sequence == "drop")
    rest = f"{made.left_over} left over at the end are a shorter sequence" if made.left_over else "none is left over"
    if made.dropped_tokens:
        rest = f"{made.dropped_tokens} left over at the end are dropped"
    logger.info(
        "%s: %d tokens of %d books in %d sequences of up to %d; %s",
        texts.source, made.tokens, made.books, len(made), max_length, rest,
    )  # fmt: skip
    return made


def text_digests(books: BooksConfig, dataset: DatasetConfig) -> set[bytes]:
    """Of every text that is not empty; they are not read again where the cache has their digests."""
    plan = make_plan(open_texts(dataset, books.text_column), _folder(books))
    return {digest.tobytes() for digest, size in zip(plan.digests, plan.sizes, strict=True) if size}


def _folder(books: BooksConfig) -> Path:
    return default_folder() if books.cache_dir is None else Path(books.cache_dir).expanduser()
