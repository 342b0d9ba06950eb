"""Starts the sandbox's processes, feeds them, keeps their time and ends them. What they are kept from: see the package."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trainers.errors import ConfigError
from trainers.rewards.sandbox import judge, runner  # compiled by the import, so that their processes need not

logger = logging.getLogger(__name__)

START_S = 60.0  # a machine with many runs may take long to start a process; the program's own time begins after that
OUTPUT_BYTES = 1 << 20
_POLL_S = 0.1
_MAX_FILES = 1000
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox.{0} import main; del sys.path[0]; main()"


class SandboxError(Exception):
    """The sandbox itself failed: nothing is known about the program."""


@dataclass(frozen=True)
class Box:
    """What a program may use. `timeout_s` is wall clock from its start; CPU time is bounded by the same number."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 16
    unsafe: bool = False


def judge_asserts(box: Box, program: str, tests: list[str], helpers: str = "", entry_point: str = "") -> list[bool]:
    """Whether each test passes: statements that raise nothing, and in which the program's functions can be called by name.

    Args:
        helpers: code of the dataset's whose definitions the tests see in place of the program's, except `entry_point`.

    Raises:
        SandboxError: one of the two processes could not be started or confined.
    """
    job = {"program": program, "helpers": helpers, "entry_point": entry_point, "tests": tests}
    with _folder() as folder, contextlib.ExitStack() as ends:
        calls_read, calls_write, answers_read, answers_write = *os.pipe(), *os.pipe()
        pipes = (calls_read, calls_write, answers_read, answers_write)
        try:
            program_process = _start(box, folder / "program", runner, ["serve"], {}, stdin=calls_read, stdout=answers_write)
            ends.callback(_end, program_process)
            fds = {"calls_fd": calls_write, "answers_fd": answers_read}
            judge_process = _start(box, folder / "judge", judge, [], fds, pass_fds=(calls_write, answers_read))
            ends.callback(_end, judge_process)
        finally:
            for fd in pipes:
                os.close(fd)
        lines = _talk(box, judge_process, json.dumps(job).encode() + b"\n", folder / "program", said=2).decode().split()
    return [line == "1" for line in lines] + [False] * (len(tests) - len(lines))


def run_script(box: Box, program: str, stdin: str = "") -> str | None:
    """What the program writes to standard output; None if it fails, takes too long, or writes too much.

    Raises:
        SandboxError: its process could not be started or confined.
    """
    text = program.encode("utf-8", "replace")
    with _folder() as folder:
        process = _start(box, folder / "program", runner, ["script"], {})
        try:
            data = b"%d\n%b%b" % (len(text), text, stdin.encode("utf-8", "replace"))
            output = _talk(box, process, data, folder / "program", said=1)
            ended = process.poll()
        finally:
            _end(process)
    return output.decode("utf-8", "replace") if ended == 0 else None


@cache
def in_force(unsafe: bool) -> str:
    """What confines programs on this machine, found out by confining one. Logged once.

    Raises:
        ConfigError: nothing does, and `unsafe` is not set.
    """
    said: list[str] = []
    with _folder() as folder:
        process = _start(Box(unsafe=unsafe), folder / "program", runner, ["script"], {})
        try:
            _talk(Box(unsafe=unsafe), process, b"4\npass", folder / "program", said=1, heard=said)
        except SandboxError as error:
            raise ConfigError(
                f"code_reward cannot run programs safely here: {error}. Enable that, run on a machine that has it, or set "
                "unsafe=true in its kwargs to run them under time and memory limits alone, with your files and network in reach"
            ) from None
        finally:
            _end(process)
    if said[0].startswith("unconfined"):
        logger.warning("code_reward runs programs %s (unsafe=true)", said[0])
    else:
        logger.info("code_reward runs programs %s", said[0])
    return said[0]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="loopwright-code-"))
    try:
        for name in ("program", "judge"):
            (folder / name).mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    box: Box,
    folder: Path,
    module: ModuleType,
    words: list[str],
    settings: dict[str, Any],
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    limits = {"cpu_s": int(box.timeout_s) + 1, "memory_bytes": box.memory_mb << 20, "file_bytes": box.disk_mb << 20}
    settings = {"folder": str(folder), "limits": limits, "unsafe": box.unsafe, "parent": os.getpid(), **settings}
    command = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        _BOOT.format(module.__name__.rpartition(".")[2]),
        str(Path(__file__).parents[1]),
    ]
    return subprocess.Popen(
        [*command, *words, json.dumps(settings)],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        pass_fds=pass_fds,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)},
        start_new_session=True,
    )


def _talk(
    box: Box, process: subprocess.Popen[bytes], data: bytes, folder: Path, said: int, heard: list[str] | None = None
) -> bytes:
    """Give `data` and take what comes, until the process ends or breaks a limit (it is killed then).

    Args:
        said: so many lines come first, of the sandbox's own processes on their confinement; they are not part of the result.
    """
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    output, begun, deadline = b"", False, time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while process.stdout in selector.get_map():
            if time.monotonic() > deadline or len(output) > OUTPUT_BYTES or (begun and _overfull(folder, box)):
                _kill(process)
                break
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is process.stdin:
                    data = _give(process.stdin.fileno(), data)
                    if not data:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, 65536):
                    output += chunk
                else:
                    selector.unregister(process.stdout)
            if not begun and output.count(b"\n") >= said:
                begun, deadline = True, time.monotonic() + box.timeout_s
    *lines, rest = output.split(b"\n", said)
    words = [line.decode("utf-8", "replace") for line in lines]
    wrong = next((line for line in words if not line.startswith(("confined: ", "unconfined: "))), None)
    if wrong is not None or len(lines) < said:
        raise SandboxError(wrong.removeprefix("refused: ") if wrong else "a process of the sandbox ended at its start")
    if heard is not None:
        heard.extend(words)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its output and go on
        process.wait(max(0.0, deadline - time.monotonic()))
    return rest


def _give(fd: int, data: bytes) -> bytes:
    """What is left of `data`; nothing if nobody reads it any more."""
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def _overfull(folder: Path, box: Box) -> bool:
    """Whether the program's files take more than they may. It cannot make folders."""
    with os.scandir(folder) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries]
    return len(sizes) > _MAX_FILES or sum(sizes) > box.disk_mb << 20


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
