"""Runs one command so that nothing of it outlives the process that asked for it. Standard library only: starts in a blink.

    owner (flow, CLI)              watched by pid and start time, because pids are used again
      └─ supervisor                own session; subreaper, so grandchildren that lose their parent come to it
          ├─ CMD                   killed by the kernel when the supervisor dies (PR_SET_PDEATHSIG)
          │   └─ …                 every descendant carries LOOPWRIGHT_LEASE=ID in its environment
          └─ log writer (thread)   what they print, without secrets, to the log file (infra.log_writer)

Secrets are what the command's environment holds under a secret's name, and what the owner writes to the supervisor's stdin: a
JSON list. No file and no command line has them.

Invariants
- CMD ends, however it ends: every descendant is killed, the log is written to its end, then the status file is.
- The owner is gone, or SIGTERM/SIGINT comes: CMD gets SIGTERM, and after the grace period the whole tree gets SIGKILL. A second
  SIGTERM shortens the grace to nothing.
- SIGKILL of the supervisor: the kernel kills CMD; what CMD left behind is found by the mark (`infra.reaper`).

Only CMD gets the SIGTERM: a trainer that writes a last checkpoint still needs its children.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

if not __package__:  # run by its path, isolated
    sys.path.insert(0, str(Path(__file__).parents[1]))

from infra.log_writer import LogWriter
from infra.redaction import Redactor

MARK = "LOOPWRIGHT_LEASE"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OWNER_CHECK_S = 0.5
LOG_S = 10.0  # for the log's last lines to be written
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (field 3); None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command, in parentheses, may itself hold spaces and parentheses.
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_start_time(pid: int) -> float | None:
    """Seconds from boot to the start of `pid`; None when it does not exist or is a zombie."""
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def alive(pid: int, start_time: float) -> bool:
    """Whether the process that started at `start_time` still runs under this pid."""
    return process_start_time(pid) == start_time


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents first, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def write_status(path: str, status: dict) -> None:
    """Write-to-temp then rename: a reader sees a whole status or the one before."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump(status, file)
    os.replace(temporary, path)


def spawn(command: list[str], output: int, lease: str) -> subprocess.Popen[bytes]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    supervisor = os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:  # died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())

    # SPT_NOENV: setproctitle (vLLM's engine and workers call it) would otherwise wipe the mark from /proc/PID/environ.
    environment = {**os.environ, MARK: lease, "SPT_NOENV": "1"}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
        preexec_fn=in_child,  # safe: one thread, and exec follows at once
    )


def reap_children(main: int) -> int | None:
    """Collect every ended child; returns the main child's return code (−signal) if it was among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == main:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def kill_rest() -> None:
    """SIGKILL every descendant until there is none; new ones come to this process as their subreaper."""
    while pids := descendants(os.getpid()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_children(0)
        time.sleep(0.01)


def supervise(main: int, owner: tuple[int, float], grace_s: float) -> tuple[int, str]:
    """Blocks until the main child has ended. Returns its return code and why it was stopped ("" when it ended by itself)."""
    reason, deadline = "", None
    while True:
        wait_s = OWNER_CHECK_S if deadline is None else max(min(OWNER_CHECK_S, deadline - time.monotonic()), 0.0)
        info = signal.sigtimedwait({signal.SIGCHLD} | STOP_SIGNALS, wait_s)
        code = reap_children(main)
        if code is not None:
            return code, reason
        stop = info is not None and info.si_signo in STOP_SIGNALS
        if deadline is None and (stop or not alive(*owner)):
            reason = "stop was asked for" if stop else f"its owner, process {owner[0]}, is gone"
            deadline = time.monotonic() + grace_s
            with suppress(ProcessLookupError):
                os.kill(main, signal.SIGTERM)
        elif deadline is not None and (stop or time.monotonic() >= deadline):
            deadline = time.monotonic() + OWNER_CHECK_S
            with suppress(ProcessLookupError):
                os.kill(main, signal.SIGKILL)


def log_writer(path: str) -> LogWriter:
    """Of the log file, with the secrets of the command's environment and those on stdin."""
    return LogWriter(path, Redactor(others=json.load(sys.stdin)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.supervisor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--owner-start", type=float, required=True, help="seconds from boot, as process_start_time gives it")
    parser.add_argument("--lease", required=True, help=f"value of {MARK} for every descendant")
    parser.add_argument("--status", required=True, help="file the status is written to, as JSON")
    parser.add_argument("--log", required=True, help="file that stdout and stderr are appended to")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    # Blocked, so that they wait for sigtimedwait instead of interrupting something else.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD} | STOP_SIGNALS)
    status = {"supervisor_pid": os.getpid(), "pid": None, "pid_start": None, "returncode": None, "signal": None, "reason": ""}
    try:
        log = log_writer(options.log)
        source, output = os.pipe()
        child = spawn(command, output, options.lease)
    except OSError as error:
        write_status(options.status, status | {"returncode": 127, "reason": f"cannot start {command[:1]}: {error}"})
        return 127
    os.close(output)
    log.start(source)
    status |= {"pid": child.pid, "pid_start": process_start_time(child.pid)}
    write_status(options.status, status)
    code, reason = supervise(child.pid, (options.owner_pid, options.owner_start), options.grace)
    child.returncode = code  # collected by reap_children; without this Popen would warn that it still runs
    kill_rest()
    log.join(LOG_S)
    write_status(options.status, status | {"returncode": code, "signal": -code if code < 0 else None, "reason": reason})
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
