"""A small pool of worker processes that are killed when a question takes too long.

    thread ─▶ idle worker, or a new one while there are fewer than `size` ─▶ JSON line in ─▶ JSON lines out ─▶ idle again
                                                                               └─ silent for too long, or dead ─▶ killed

For work that may run for minutes and holds the interpreter lock: a thread could neither be stopped nor kept out of the way of
the loop that generates.

Invariants: a worker answers one question at a time; one that was killed is never used again; the pool starts nothing before its
first question, and its workers see the end of their input when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

_KEPT_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")


class WorkerGone(Exception):
    """The worker died or said nothing for the allowed time."""


class Worker:
    """One process that first says it is ready."""

    def __init__(self, command: Sequence[str], start_s: float) -> None:
        environment = {name: os.environ[name] for name in _KEPT_ENV if name in os.environ}  # no keys, no tokens
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,  # a signal to the process group of whoever asks must not spoil an answer
        )
        self._buffer = b""
        try:
            self.hello = self.read(start_s)
        except WorkerGone:
            self.kill()
            raise

    def send(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise WorkerGone from error

    def read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise WorkerGone
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise WorkerGone
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


class WorkerPool:
    """Thread-safe.

    Args:
        command: starts a worker; its first line is `{}`, or `{"error": …}` if it cannot work at all.
        size: most workers at once.
        start_s: most seconds until that first line.
    """

    def __init__(self, command: Sequence[str], size: int, start_s: float = 120.0) -> None:
        self._command, self._start_s = command, start_s
        self._slots = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        atexit.register(self.close)

    def ask(self, question: dict[str, Any], replies: int, limit_s: float) -> list[dict[str, Any]]:
        """The worker's `replies` answers; fewer if it took more than `limit_s` for the next one, or died of it.

        Raises:
            RuntimeError: no worker can be started.
        """
        with self._slots:
            worker = self._take()
            answers: list[dict[str, Any]] = []
            try:
                worker.send(question)
                while len(answers) < replies:
                    answers.append(worker.read(limit_s))
            except WorkerGone:
                self._discard(worker)
                return answers
            except BaseException:  # half an answer would be taken for the next question's
                self._discard(worker)
                raise
            with self._lock:
                self._idle.append(worker)
            return answers

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                self._workers.remove(worker)  # it ended while nothing was asked of it: no question's fault
                worker.kill()
        try:
            worker = Worker(self._command, self._start_s)
        except WorkerGone:
            command = " ".join(self._command)
            raise RuntimeError(f"`{command}` ended at its start, or was silent for {self._start_s:g} s") from None
        with self._lock:
            self._workers.append(worker)
        if "error" in worker.hello:
            self._discard(worker)
            raise RuntimeError(worker.hello["error"])
        return worker

    def _discard(self, worker: Worker) -> None:
        with self._lock:
            self._workers.remove(worker)
        worker.kill()

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [worker._process.pid for worker in self._workers]

    def close(self) -> None:
        with self._lock:
            workers, self._workers, self._idle = self._workers, [], []
        for worker in workers:
            worker.kill()
