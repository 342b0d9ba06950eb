"""Reads a stream ahead of need, and remembers how to come back to where it was.

    thread: open(epoch) ─▶ row ─▶ row ─▶ …  at most `AHEAD` rows ─▶ event loop: row(epoch, position)
              └─▶ every `MARK_EVERY` rows a Mark: position, the dataset's state, digest of the next row

Invariants:
- the event loop never waits for the dataset, and the dataset is never more than `AHEAD` rows ahead of the prompts that started;
- a resumed pass begins at a mark not beyond the first row that is needed; rows before the wanted one are skipped;
- a state that does not lead back to the row it was taken before (a shuffle buffer is not part of it) is noticed by that row's
  digest: then the pass is read from its beginning, which is as exact and takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainers.errors import DatasetError
from trainers.streams import Stream, row_digest

logger = logging.getLogger(__name__)

AHEAD = 64
MARK_EVERY = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """`state`: the dataset's before it gives row `position`, whose digest is `digest`."""

    position: int
    state: Any
    digest: str


class StreamReader:
    """Gives the rows of a stream in ascending (epoch, position).

    Args:
        tolerant: a pass that cannot be found again is gone on with nevertheless (`allow_dataset_change`).
    """

    def __init__(self, stream: Stream, tolerant: bool = False) -> None:
        self._stream, self._tolerant = stream, tolerant
        self._marks: defaultdict[int, list[Mark]] = defaultdict(list)
        self._pass: _Pass | None = None
        self.waits_for: str | None = None  # what `row` waits for right now

    async def row(self, epoch: int, position: int) -> dict[str, Any] | None:
        """Row `position` of the pass `epoch`; None: the pass ended before it, with `length()` rows.

        Raises:
            DatasetError: the stream failed.
        """
        if self._pass is None or self._pass.epoch != epoch:
            self.close()
            marks = self._marks[epoch]
            self._pass = _Pass(self._stream, epoch, marks[-1] if marks else None, self._tolerant)
        self.waits_for = f"row {position} of epoch {epoch} of {self._stream.source}"
        try:
            while True:
                at, row, mark = await self._pass.take()
                if mark is not None:
                    self._marks[epoch].append(mark)
                if row is None or at >= position:
                    assert row is None or at == position, f"row {position} of epoch {epoch} was asked for after row {at}"
                    return row
        finally:
            self.waits_for = None

    def length(self) -> int:
        """Rows of the pass that ended."""
        assert self._pass is not None and self._pass.length is not None, "the pass has not ended"
        return self._pass.length

    def forget(self, needed: dict[int, int]) -> None:
        """Drop marks that no resume needs: per epoch under way, rows below the position are not needed again."""
        for epoch in list(self._marks):
            if epoch not in needed:
                del self._marks[epoch]
                continue
            marks = self._marks[epoch]
            while len(marks) > 1 and marks[1].position <= needed[epoch]:
                del marks[0]

    def state_dict(self, needed: dict[int, int]) -> dict[str, Any]:
        """Per epoch under way, the last mark not beyond the first row that is needed."""
        self.forget(needed)
        usable = {epoch: marks[0] for epoch, marks in self._marks.items() if marks and marks[0].position <= needed[epoch]}
        return {str(epoch): asdict(mark) for epoch, mark in usable.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for epoch, mark in state.items():
            self._marks[int(epoch)] = [Mark(**mark)]

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None


_Item = tuple[int, dict[str, Any] | None, Mark | None]  # position, row (None: the end), mark taken before it


class _Pass:
    """One pass over the stream, read by a thread. The thread is a daemon: a dataset that never answers keeps nobody."""

    def __init__(self, stream: Stream, epoch: int, mark: Mark | None, tolerant: bool) -> None:
        self.epoch = epoch
        self.length: int | None = None
        self._stream, self._mark, self._tolerant = stream, mark, tolerant
        self._ready: deque[_Item | Exception] = deque()
        self._slots = threading.Semaphore(AHEAD)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        threading.Thread(target=self._read, name=f"read epoch {epoch}", daemon=True).start()

    async def take(self) -> _Item:
        while not self._ready:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._ready[0]
        if isinstance(item, Exception):
            raise item
        if item[1] is None:
            self.length = item[0]
            return item  # stays: a pass that ended has ended
        self._ready.popleft()
        self._slots.release()
        return item

    def close(self) -> None:
        self._closed = True
        self._slots.release()

    def _put(self, item: _Item | Exception) -> None:
        self._ready.append(item)
        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._arrived.set)

    # In the thread

    def _read(self) -> None:
        try:
            opened, rows, start = self._begin()
            position = start
            while True:
                self._slots.acquire()
                if self._closed:
                    return
                # At the start there is a mark already, or no need of one.
                state = self._state(opened) if position > start and position % MARK_EVERY == 0 else None
                row = next(rows, None)
                mark = Mark(position, state, row_digest(row)) if row is not None and state is not None else None
                self._put((position, row, mark))
                if row is None:
                    return
                position += 1
        except Exception as error:
            self._put(error if isinstance(error, DatasetError) else _failed(self._stream, error))

    def _state(self, opened: Any) -> Any:
        """The dataset's state before its next row; None where it has none."""
        if not self._stream.stateful:
            return None
        state = copy.deepcopy(opened.state_dict())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"the state_dict() of {self._stream.source} cannot be written as JSON ({error}): make it of numbers, strings, "
                "lists and dicts"
            ) from error
        return state

    def _begin(self) -> tuple[Any, Iterator[dict[str, Any]], int]:
        """The opened dataset, its rows from where the mark says, and the first one's position."""
        mark = self._mark
        opened = self._stream.open(self.epoch)
        if mark is None:
            return opened, self._stream.rows(opened, self.epoch), 0
        opened.load_state_dict(copy.deepcopy(mark.state))
        rows = self._stream.rows(opened, self.epoch, mark.position)
        first = next(rows, None)
        if first is not None and row_digest(first) == mark.digest:
            return opened, itertools.chain([first], rows), mark.position
        logger.warning(
            "the state of %s does not lead back to row %d (it holds no shuffle buffer): reading epoch %d from its start",
            self._stream.source,
            mark.position,
            self.epoch,
        )
        opened = self._stream.open(self.epoch)
        rows = self._stream.rows(opened, self.epoch)
        first = next(itertools.islice(rows, mark.position, None), None)
        if first is None or row_digest(first) != mark.digest:
            message = (
                f"{self._stream.source} does not give the rows of epoch {self.epoch} in the same order again: row "
                f"{mark.position} is not the one it was when the checkpoint was written"
            )
            if not self._tolerant:
                raise DatasetError(
                    f"{message}. Give its shuffle a seed, or set allow_dataset_change=true to go on at this row nevertheless"
                )
            logger.warning("%s; going on there: some rows may be trained twice and others not", message)
        return opened, itertools.chain([] if first is None else [first], rows), mark.position


def _failed(stream: Stream, error: Exception) -> DatasetError:
    failure = DatasetError(f"{stream.source} could not be read: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
