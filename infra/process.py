"""The caller's side of `infra.supervisor`, and finding what a lease left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import supervisor
from infra.redaction import known_secrets, redact
from infra.supervisor import MARK, alive, process_start_time

__all__ = ["Supervised", "alive", "current_owner", "kill_marked", "marked", "process_start_time"]

START_TIMEOUT_S = 30.0


def current_owner() -> tuple[int, float]:
    """(pid, start time) of this process."""
    start = process_start_time(os.getpid())
    assert start is not None
    return os.getpid(), start


@dataclass
class Supervised:
    """A command under a supervisor. `pid` is the command's own process; signals to it are felt as they would be without one.

    `returncode` is None while it runs, negative for a signal. `reason` says why the supervisor stopped it, if it did.
    """

    lease: str
    log_path: Path
    status_path: Path
    pid: int
    pid_start: float
    supervisor_pid: int
    log_start: int = 0  # size of the log before this start
    returncode: int | None = None
    reason: str = ""
    _supervisor: subprocess.Popen[bytes] = field(repr=False, default=None)  # type: ignore[assignment]

    @classmethod
    def start(
        cls,
        command: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None,
        log: str | os.PathLike[str],
        lease: str,
        owner: tuple[int, float] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        grace_s: float = 10.0,
    ) -> Supervised:
        """Start `command`; its output is appended to `log`, without the secrets that this process and `command` know of.

        `env` is the whole environment (None: this process's). `lease` names everything the command will start, so give
        each command its own. `owner` (default: this process) is whom the command must not outlive. OSError when the command
        cannot be executed.
        """
        log_path = Path(log).absolute()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_start = log_path.stat().st_size if log_path.exists() else 0
        handle, status_name = tempfile.mkstemp(dir=log_path.parent, prefix=".status-", suffix=".json")
        os.close(handle)
        owner_pid, owner_start = owner or current_owner()
        # Run by path and isolated: neither the working folder nor PYTHONPATH, which belong to the command, matter to it.
        arguments = [
            sys.executable,
            "-I",
            "-S",
            supervisor.__file__,
            "--owner-pid",
            str(owner_pid),
            "--owner-start",
            repr(owner_start),
        ]
        arguments += ["--lease", lease, "--status", status_name, "--log", str(log_path), "--grace", str(grace_s), "--"]
        process = subprocess.Popen(
            arguments + [os.fspath(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**(os.environ if env is None else env), MARK: lease},
            cwd=cwd,
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as secrets:
            secrets.write(json.dumps(sorted(known_secrets())).encode())
        status_path = Path(status_name)
        status = _first_status(status_path, process)
        if status.get("pid") is None:
            process.wait()
            status_path.unlink(missing_ok=True)
            raise OSError(status.get("reason") or f"the supervisor of {command[0]} ended with code {process.returncode}")
        return cls(
            lease=lease,
            log_path=log_path,
            status_path=status_path,
            pid=status["pid"],
            pid_start=status["pid_start"] or 0.0,
            supervisor_pid=process.pid,
            log_start=log_start,
            _supervisor=process,
        )

    def poll(self) -> int | None:
        """The return code once the command and all it started are gone, else None."""
        if self.returncode is None and self._supervisor.poll() is not None:
            status = _read_status(self.status_path)
            if status.get("returncode") is None:
                # The supervisor itself was killed. The kernel killed the command with it; the rest is found by its mark.
                kill_marked(self.lease)
                status = {"returncode": -signal.SIGKILL, "reason": f"its supervisor {self._death_of_supervisor()}"}
            self.returncode, self.reason = status["returncode"], status["reason"]
            self.status_path.unlink(missing_ok=True)
        return self.returncode

    def _death_of_supervisor(self) -> str:
        return _describe(self._supervisor.returncode)

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until the command has ended. `subprocess.TimeoutExpired` after `timeout` seconds."""
        self._supervisor.wait(timeout)
        code = self.poll()
        assert code is not None
        return code

    def stop(self, grace_s: float | None = None) -> int:
        """SIGTERM to the command, SIGKILL to everything after `grace_s` (default: as given at start). Returns the code."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                self._supervisor.terminate()
            try:
                return self.wait(grace_s)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    self._supervisor.terminate()
        return self.wait()

    def describe_exit(self) -> str:
        """For messages: "still running", "exit code 1", "killed by SIGKILL", with the supervisor's reason if it has one."""
        code = self.poll()
        if code is None:
            return "still running"
        return _describe(code) + (f" ({self.reason})" if self.reason else "")

    def log_tail(self, lines: int = 20) -> str:
        """The last lines this start has logged, at most 64 KiB, without secrets: a tail ends in causes and on pages."""
        with self.log_path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 65536, self.log_start))
            return redact("\n".join(file.read().decode(errors="replace").splitlines()[-lines:]))


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _read_status(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def _first_status(path: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None  # asked before the file is read: a status written just before the end is seen
        if status := _read_status(path):
            return status
        if ended:
            return {}
        time.sleep(0.005)
    process.kill()
    return {"reason": f"the supervisor did not report within {START_TIMEOUT_S:.0f} s"}


def marked(lease: str) -> list[int]:
    """Pids of this user's processes that a command of `lease` started, supervisor included."""
    return carrying(MARK, lease)


def carrying(variable: str, value: str) -> list[int]:
    """Pids of this user's processes, but for this one, that were started with an environment variable of this value."""
    needle = f"\0{variable}={value}\0".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        # PermissionError: another user's process, which cannot be ours. A zombie's environment reads as empty.
        with suppress(OSError):
            if needle in b"\0" + Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


def kill_marked(lease: str, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL every process of `lease` and wait until none is left. Returns the pids. TimeoutError when some will not die.

    A dying process loses its environment, and with it the mark, before it lets go of its files, ports and memory; so those
    that were found are waited for by pid and start time.
    """
    killed: dict[int, float] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        pids = marked(lease)
        # All before any is killed: a supervisor takes its child along.
        killed |= {pid: start for pid in pids if (start := process_start_time(pid)) is not None}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        dying = [pid for pid, start in killed.items() if alive(pid, start)]
        if not pids and not dying:
            return list(killed)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted({*pids, *dying})} of lease {lease} did not die within {timeout_s:.0f} s")
        time.sleep(0.01)
