"""Real processes: whatever is killed, and however, nothing that was started stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from infra.process import Supervised, alive, current_owner, kill_marked, marked, process_start_time
from tests.support.waiting import wait_until

# A child that ignores SIGTERM and has left its parent, its session and its process group.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def lease():
    name = f"test-{uuid.uuid4().hex}"
    yield name
    kill_marked(name)


def start(tmp_path: Path, lease: str, code: str, *arguments: str, **options) -> Supervised:
    command = [sys.executable, "-S", "-c", textwrap.dedent(code), *arguments]
    return Supervised.start(command, None, tmp_path / "log", lease, **options)


def with_daemon(tmp_path: Path, lease: str, **options) -> tuple[Supervised, int]:
    """A command that sleeps, and the pid of the daemon it has started."""
    pid_file = tmp_path / "daemon"
    process = start(tmp_path, lease, DAEMON + "\ntime.sleep(600)", str(pid_file), **options)
    pid = wait_until(lambda: pid_file.exists() and pid_file.read_text(), what="daemon")
    return process, int(pid)


def test_environment_is_given_and_log_is_appended(tmp_path, lease):
    command = [
        sys.executable,
        "-S",
        "-c",
        "import os; print(os.environ['LOOPWRIGHT_LEASE'], os.environ.get('HOME'), os.environ['X'])",
    ]
    first = Supervised.start(command, {"X": "1"}, tmp_path / "log", lease)
    assert first.wait(30) == 0
    second = Supervised.start(command, {"X": "2"}, tmp_path / "log", lease)
    assert second.wait(30) == 0
    assert (tmp_path / "log").read_text().splitlines() == [f"{lease} None 1", f"{lease} None 2"]
    assert second.log_tail() == f"{lease} None 2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"], "a status file was left behind"


@pytest.mark.parametrize(
    ("code", "returncode", "words"),
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", -11, "killed by SIGSEGV"),
    ],
)
def test_how_it_ended(tmp_path, lease, code, returncode, words):
    process = start(tmp_path, lease, code)
    assert process.wait(30) == process.poll() == returncode
    assert process.describe_exit() == words


def test_a_command_that_does_not_exist(tmp_path, lease):
    with pytest.raises(OSError, match="no-such-command"):
        Supervised.start(["/no-such-command"], None, tmp_path / "log", lease)


def test_sigkill_of_the_command_takes_its_daemon_along(tmp_path, lease):
    process, daemon = with_daemon(tmp_path, lease)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert process.describe_exit() == "killed by SIGKILL"
    assert process_start_time(daemon) is None
    assert marked(lease) == []


def test_sigkill_of_the_owner(tmp_path, lease):
    code = f"""
        import sys, time
        from pathlib import Path
        from tests.infra.test_supervisor import with_daemon
        process, daemon = with_daemon(Path({str(tmp_path)!r}), {lease!r}, grace_s=0.5)
        print(process.pid, daemon, flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert all(process_start_time(pid) is not None for pid in pids)
        owner.kill()
        owner.wait()
    wait_until(lambda: not marked(lease), what="death of everything the owner started")
    assert all(process_start_time(pid) is None for pid in pids)
    status = json.loads(next(tmp_path.glob(".status-*")).read_text())
    assert status["reason"] == f"its owner, process {owner.pid}, is gone"


def test_sigkill_of_the_supervisor(tmp_path, lease):
    process, daemon = with_daemon(tmp_path, lease)
    start_time = process_start_time(daemon)
    assert start_time is not None
    os.kill(process.supervisor_pid, signal.SIGKILL)
    wait_until(lambda: process_start_time(process.pid) is None, what="the kernel's death signal to the command")
    assert marked(lease) == [daemon] and alive(daemon, start_time), (
        "the daemon should have survived: it is what the mark is for"
    )
    assert process.wait(30) == -signal.SIGKILL
    assert process.describe_exit() == "killed by SIGKILL (its supervisor killed by SIGKILL)"
    assert marked(lease) == [] and not alive(daemon, start_time)


def test_stop_asks_the_command_only(tmp_path, lease):
    """A command that cleans up on SIGTERM still has its children meanwhile."""
    code = """
        import os, signal, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        def stop(*_):
            time.sleep(0.3)
            print("child is alive:", child.poll() is None, flush=True)
            os._exit(7)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(600)
    """
    process = start(tmp_path, lease, code)
    wait_until(lambda: "ready" in process.log_tail())
    assert process.stop() == 7
    assert process.log_tail().splitlines() == ["ready", "child is alive: True"]
    assert process.describe_exit() == "exit code 7 (stop was asked for)"
    assert marked(lease) == []
    assert process.stop() == 7, "stopping again is harmless"


def test_stop_kills_what_ignores_it(tmp_path, lease):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    process = start(tmp_path, lease, code, grace_s=300.0)
    wait_until(lambda: "ready" in process.log_tail())
    assert process.stop(grace_s=0.2) == -signal.SIGKILL


def test_the_mark_survives_setproctitle(tmp_path, lease):
    """vLLM's engine and workers rename themselves, which wipes a process's environment as /proc shows it."""
    pytest.importorskip("setproctitle")
    code = (
        "import setproctitle, time; setproctitle.setproctitle('VLLM::' + 'x' * 200); print('ready', flush=True); time.sleep(99)"
    )
    process = Supervised.start([sys.executable, "-c", code], None, tmp_path / "log", lease)
    wait_until(lambda: "ready" in process.log_tail())
    assert b"VLLM::" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert process.pid in marked(lease)
    process.stop(grace_s=0.5)


def test_a_pid_used_again_is_another_process():
    pid, start_time = current_owner()
    assert alive(pid, start_time)
    assert not alive(pid, start_time - 1.0)


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    wait_until(lambda: process_start_time(child.pid) is None, what="end of the child")
    assert Path(f"/proc/{child.pid}").exists(), "the child should still be a zombie here"
    child.wait()
