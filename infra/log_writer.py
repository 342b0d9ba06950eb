"""What a command prints, on its way to its log file: whole lines at a time, without secrets. Standard library only.

    command ── pipe ──▶ LogWriter (a thread of the supervisor) ── redacted lines ──▶ log file

Invariants
- The pipe is always read: a disk that is full costs lines of the log, counted there once there is room, and never holds up the
  command.
- A line is written when it is whole (`\\n` or `\\r`), because a secret in it must be; the last one at the end. Of a very
  long one all is written but its last `KEEP` bytes, in which a secret may have begun.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

READ = 65536
KEEP = 8192  # bytes; longer than secrets are
LONGEST = 1 << 20  # bytes of a line, beyond which its beginning is written


class LogWriter:
    """Appends to `path` what comes out of a pipe.

    Args:
        redact: takes the secrets out of a text.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, redact: Callable[[str], str]) -> None:
        self._target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._redact = redact
        self._lost = 0  # bytes that could not be written
        self._thread: threading.Thread | None = None

    def start(self, source: int) -> None:
        """Read this end of a pipe, in a thread, until nobody has the other end any more; closes it and the file then."""
        self._thread = threading.Thread(target=self._run, args=(source,), name="log", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Returns when everything is written: everybody who could write to the pipe is gone; or after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, source: int) -> None:
        held = b""
        while chunk := os.read(source, READ):
            held += chunk
            if end := max(held.rfind(b"\n"), held.rfind(b"\r")) + 1:
                self._write(self._clean(held[:end]))
                held = held[end:]
            elif len(held) > LONGEST:
                clean = self._clean(held)
                self._write(clean[:-KEEP])
                held = clean[-KEEP:]
        self._write(self._clean(held))
        os.close(source)
        os.close(self._target)

    def _clean(self, data: bytes) -> bytes:
        return self._redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _write(self, data: bytes) -> None:
        left = f"[{self._lost} bytes of this log could not be written]\n".encode() + data if self._lost else data
        try:
            while left:
                left = left[os.write(self._target, left) :]
            self._lost = 0
        except OSError:  # a full disk
            self._lost += min(len(left), len(data))
