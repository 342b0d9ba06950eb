"""The tracking journal: JSON lines on local disk between the trainer and MLflow, and the rule that decides what may be sent.

    Tracker.log ──append──▶ outbox.jsonl ──read──▶ Held ──released──▶ sender (background thread) ──▶ MLflow
                              state.json: how far it was sent ──compact──▶ a shorter outbox.jsonl

Invariants:
- a record is on disk (in the page cache: it survives SIGKILL of the process, not a power cut) when `append` returns, so what
  was logged before a checkpoint is there whenever the checkpoint is;
- values of a step are held until that step is committed, because a run resumed from an earlier step trains it again, and
  MLflow can neither overwrite nor delete a value;
- the offset in `state.json` never passes a record that is held or not sent; what lies behind it may be processed again;
- offsets count all bytes ever appended; the file's first line says at which of them it begins, so a shorter file takes the old
  one's place by one rename, and a kill at any moment leaves file and state in agreement;
- what was sent takes less room than what was not, or less than `COMPACT_BYTES`;
- one process at a time has an outbox open.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

Record = dict[str, Any]
_HEAD = b'{"kind": "head", "begins_at": '
HEAD_BYTES = 64
READ_BYTES = 1 << 20
COMPACT_BYTES = 1 << 20


class OutboxInUse(RuntimeError):
    """Another live process has the outbox open: two trainers would be writing one run."""


class Point(NamedTuple):
    """One value of one metric; `time_ms` is when it was logged."""

    name: str
    value: float
    step: int
    time_ms: int


class Outbox:
    """An append-only file of JSON records with a sent-up-to offset and a small persistent `state`.

    Args:
        directory: made if it is missing.
        lock_timeout_s: how long to wait for another process to let go.

    Raises:
        OutboxInUse: another process has it open.
    """

    def __init__(self, directory: Path, lock_timeout_s: float = 10.0) -> None:
        self.directory = directory
        self.path = directory / "outbox.jsonl"
        self._state_path = directory / "state.json"
        directory.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(directory / "lock", lock_timeout_s)
        self.state: dict[str, Any] = json.loads(self._state_path.read_text()) if self._state_path.exists() else {}
        self._mutex = threading.Lock()
        self._state_mutex = threading.Lock()
        self._unsaved: deque[bytes] = deque()  # what did not fit on a full disk
        self._open_file()
        self._open_at()

    def _open_file(self) -> None:
        """Opens the file and learns which offset each of its bytes has: position + `_shift`."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._begin, self._shift = _head(os.pread(self._file, HEAD_BYTES, 0))
        self._size = os.fstat(self._file).st_size + self._shift

    def _open_at(self) -> None:
        self.state["offset"] = max(self.state.get("offset", 0), self._begin)
        if self.offset >= self._size:
            # All of it was sent: start over. Killed between these two lines, the offset lies behind the end: the same branch.
            os.ftruncate(self._file, 0)
            self.save_state(offset=0, drained=0)
            self._size = self._begin = self._shift = 0
        elif os.pread(self._file, 1, self._size - self._shift - 1) != b"\n":
            self._size += os.write(self._file, b"\n")  # the last writer was killed within a line; `read` skips it

    @property
    def offset(self) -> int:
        return self.state["offset"]

    @property
    def size(self) -> int:
        """Bytes written; `offset < size`: something is held or waits to be sent."""
        return self._size

    def compact(self) -> None:
        """Drop what was sent, if that is worth it. Appending waits only for what came while the rest was copied."""
        start = self.offset
        if start - self._begin < max(COMPACT_BYTES, self._size - start):
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(_HEAD + b"%d}\n" % start)
                copied = self._copy(file, start, self._size)
                with self._mutex:
                    self._copy(file, copied, self._size)
                    file.flush()
                    os.replace(temporary, self.path)
                    os.close(self._file)
                    self._open_file()
        except OSError as error:  # no room for the copy: the long file serves as well
            log.info("tracking: %s is not made shorter: %s", self.path, error)
            temporary.unlink(missing_ok=True)

    def _copy(self, file: Any, start: int, end: int) -> int:
        while start < end and (data := os.pread(self._file, min(READ_BYTES, end - start), start - self._shift)):
            start += file.write(data)
        return start

    def append(self, record: Record) -> None:
        """Write one record. A full disk is warned of and the record kept in memory: tracking never stops training."""
        line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
        with self._mutex:
            if self._file < 0:
                log.warning("tracking: a %s record came after the end and is dropped", record["kind"])
                return
            self._unsaved.append(line)
            try:
                while self._unsaved:
                    self._write(self._unsaved[0])
                    self._unsaved.popleft()
            except OSError as error:
                if len(self._unsaved) == 1:
                    log.warning("tracking: cannot write %s (%s); keeping records in memory meanwhile", self.path, error)

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, self._size - self._shift)
            raise
        self._size += written

    def read(self, offset: int) -> list[tuple[Record, int]]:
        """Records from `offset` on (at most about a MiB of them), each with the offset behind it."""
        data = os.pread(self._file, min(READ_BYTES, max(self._size - offset, 0)), offset - self._shift)
        while b"\n" not in data and offset + len(data) < self._size:
            position = offset + len(data) - self._shift
            data += os.pread(self._file, min(READ_BYTES, self._size - offset - len(data)), position)
        records: list[tuple[Record, int]] = []
        end = offset
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            end += len(line)
            try:
                records.append((json.loads(line), end))
            except ValueError:
                records.append(({"kind": "torn"}, end))
        return records

    def save_state(self, **values: Any) -> None:
        """Merge `values` into the state and write it by rename."""
        with self._state_mutex:
            self.state.update(values)
            write_atomically(self._state_path, json.dumps(self.state, indent=1).encode())

    def close(self) -> None:
        with self._mutex:
            os.close(self._file)
            self._file = -1  # the number may soon be that of another file
        os.close(self._lock_file)


class Held:
    """Decides which records may be sent: pure, fed in the order of the file.

    Ready at once: tags, artefacts, system metrics. Held per step: metrics, rollouts and their traces, until
    - `commit` of step c: those of steps ≤ c are released;
    - `start` from checkpoint step R > 0: those ≤ R are released (the checkpoint is there, only the commit was not written),
      later ones are superseded and dropped; R = 0 (from the beginning): all held ones are dropped; R unknown (the attempt
      failed before it trained): none is touched;
    - `end` as FINISHED: all are released. Any other end keeps them held: the run may be resumed and train these steps again.
    """

    def __init__(self) -> None:
        self._points: dict[int, dict[str, Point]] = {}
        self._rollouts: dict[int, list[dict[str, Any]]] = {}
        self._traces: dict[int, list[Record]] = {}
        self._since: int | None = None

    def needed_from(self, end: int) -> int:
        """The offset up to which nothing is held; `end` is the offset behind the last record fed."""
        return end if self._since is None else self._since

    def feed(self, record: Record, start: int) -> list[Point | Record]:
        """What `record`, which begins at offset `start`, releases, in the order in which to send it."""
        kind = record["kind"]
        if kind in ("metrics", "rollouts", "trace"):
            self._hold(record, start)
            return []
        if kind == "system":
            return [Point(name, value, record["step"], record["time_ms"]) for name, value in record["values"].items()]
        if kind == "commit":
            return [*self._release(record["step"]), record]
        if kind == "start":
            resumed = record["resume_step"]
            if resumed is None:
                return [record]
            released = self._release(resumed) if resumed > 0 else []
            superseded = sorted(self._points)
            self._clear()
            return [*released, {**record, "superseded": superseded}]
        if kind == "end":
            if record["status"] == "FINISHED":
                return [*self._release(None), record]
            return [{**record, "uncommitted": [point._asdict() for point in self._sorted_points()]}]
        return [] if kind == "torn" else [record]

    def _hold(self, record: Record, start: int) -> None:
        step = record["step"]
        if self._since is None:
            self._since = start
        if record["kind"] == "rollouts":
            self._rollouts.setdefault(step, []).extend(record["rows"])
            return
        if record["kind"] == "trace":
            self._traces.setdefault(step, []).append(record)
            return
        held = self._points.setdefault(step, {})
        for name, value in record["values"].items():
            held[name] = Point(name, value, step, record["time_ms"])

    def _release(self, up_to: int | None) -> list[Point | Record]:
        held = sorted({*self._points, *self._rollouts, *self._traces})
        steps = [step for step in held if up_to is None or step <= up_to]
        released: list[Point | Record] = []
        for step in steps:
            released += self._points.pop(step, {}).values()
            if rows := self._rollouts.pop(step, None):
                released.append({"kind": "rollouts", "step": step, "rows": rows})
            released += self._traces.pop(step, [])
        if not self._points and not self._rollouts and not self._traces:
            self._since = None
        return released

    def _sorted_points(self) -> list[Point]:
        return [point for step in sorted(self._points) for point in self._points[step].values()]

    def _clear(self) -> None:
        self._points.clear()
        self._rollouts.clear()
        self._traces.clear()
        self._since = None


def leftover(directory: Path) -> bool:
    """Whether an outbox has records that its last sender did not get to. What is held for a resume does not count."""
    try:
        drained = json.loads((directory / "state.json").read_text()).get("drained", 0)
        with (directory / "outbox.jsonl").open("rb") as file:
            _, shift = _head(file.read(HEAD_BYTES))
            return drained < os.fstat(file.fileno()).st_size + shift
    except (OSError, ValueError):
        return False


def _head(start_of_file: bytes) -> tuple[int, int]:
    """The offset that the file begins at, and offset − position."""
    first = start_of_file.partition(b"\n")[0]
    if not first.startswith(_HEAD):
        return 0, 0
    begin = int(json.loads(first)["begins_at"])
    return begin, begin - len(first) - 1


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def write_atomically(path: Path, data: bytes) -> None:
    """Write-to-temp then rename: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _lock(path: Path, timeout_s: float) -> int:
    """An exclusive lock that ends with the process, however it ends, and is not inherited by its children."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise OutboxInUse(
                    f"another process writes {path.parent}: end it first, or choose another output_dir"
                ) from error
            time.sleep(0.1)
