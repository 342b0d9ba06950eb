"""`loopwright up`: Prefect, MLflow and a worker on one machine, kept by one daemon.

    loopwright up ──starts──▶ python -m flows.services      own session, outlives the command; owns the rest
                                ├─ Prefect server           supervised: gone within a second of the daemon, however it ends
                                ├─ MLflow server
                                ├─ Prefect worker           its flow runs are its children
                                └─ every 30 s: reap, restart what died

`up.json` in the Loopwright home names the daemon (pid and start time) and the addresses; it is written when all is ready.
Everything listens on loopback.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from flows import prefect_api
from flows.reaping import reap_all
from infra import mlflow_server
from infra.home import home
from infra.leases import LeaseManager, PortLease
from infra.outbox import write_atomically
from infra.process import Supervised, alive, current_owner
from infra.registry import Registry
from trainers.errors import LoopwrightError

POOL = "loopwright"
WORKER = f"worker-{socket.gethostname()}"
REAP_S = 30.0
WORKER_GRACE_S = 40.0  # a flow run that is stopped with its worker lets its trainer write a checkpoint
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0


class ServicesError(LoopwrightError):
    """`up` or `down` did not get where it should; the message names the log."""

    failure_class = "infrastructure"


@dataclass(frozen=True)
class Up:
    """Contents of up.json."""

    pid: int
    start_time: float
    prefect_port: int
    prefect_url: str
    mlflow_url: str
    worker: str

    @property
    def prefect_ui(self) -> str:
        return self.prefect_url.removesuffix("/api")


def running() -> Up | None:
    """What is up on this machine, None if nothing is."""
    try:
        up = Up(**json.loads(_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return up if alive(up.pid, up.start_time) else None


def start() -> list[tuple[str, str]]:
    """Start the daemon and wait until everything is ready; the addresses. Already up: just the addresses.

    Raises:
        ServicesError: with the end of the daemon's log.
    """
    if running() is None:
        log = home() / "up.log"
        with log.open("wb") as output:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "flows.services"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            _wait_until_up(daemon, log)
        except BaseException:  # Ctrl-C, too: what was asked for here must not come up after all
            if daemon.poll() is None:
                daemon.terminate()
            raise
    return describe()


def _wait_until_up(daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while running() is None:
        # Exit code 0: another command's daemon is on its way, so wait for that one.
        if daemon.poll() or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ServicesError(f"the services did not start; the end of {log}:\n{tail}")
        time.sleep(0.2)


def stop() -> bool:
    """Stop what is up and wait until it is gone. False: nothing was.

    Raises:
        ServicesError: it does not stop.
    """
    up = running()
    if up is None:
        return False
    os.kill(up.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while alive(up.pid, up.start_time):
        if time.monotonic() > deadline:
            raise ServicesError(f"process {up.pid} does not stop; its log is {home() / 'up.log'}")
        time.sleep(0.1)
    return True


def describe() -> list[tuple[str, str]]:
    """Rows of (service, address)."""
    up = running()
    if up is None:
        return [("services", "not running; `loopwright up` starts them")]
    return [
        ("Prefect", up.prefect_ui),
        ("MLflow", up.mlflow_url),
        ("worker", f"{up.worker} (work pool {POOL})"),
        ("daemon", f"process {up.pid}, log {home() / 'up.log'}"),
    ]


def _file() -> Path:
    return home() / "up.json"


class Stopped(Exception):
    """SIGTERM or SIGINT came."""


def main() -> int:
    """The daemon. Returns when it is told to stop, or at once if there is one already."""
    lock = (home() / "up.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        with ExitStack() as stack:
            _serve(stack)
    except Stopped:
        print("stopped", flush=True)
    finally:
        _file().unlink(missing_ok=True)
        os.environ.pop("PREFECT_API_URL", None)  # its own, which is gone by now
        print(reap_all(), flush=True)
    return 0


def _serve(stack: ExitStack) -> None:
    """Start everything, then keep it running. Ends by an exception only."""
    registry = Registry()
    leases = stack.enter_context(LeaseManager(registry))
    print(reap_all(registry), flush=True)
    prefect, mlflow = leases.lease_port(), leases.lease_port()
    os.environ.update(prefect_api.settings(prefect.port))
    services = {
        "Prefect": lambda: prefect_api.start_server(prefect),
        "MLflow": lambda: _start_mlflow(mlflow),
        "worker": lambda: _start_worker(leases),
    }
    processes: dict[str, Supervised] = {}
    stack.callback(lambda: [process.stop() for process in reversed(processes.values())])
    for name, begin in services.items():
        if name == "worker":
            subprocess.run([sys.executable, "-m", "flows.deployments"], check=True)
        processes[name] = begin()
        print(f"{name} started", flush=True)
    pid, start_time = current_owner()
    up = Up(pid, start_time, prefect.port, f"http://127.0.0.1:{prefect.port}/api", f"http://127.0.0.1:{mlflow.port}", WORKER)
    write_atomically(_file(), json.dumps(asdict(up), indent=2).encode())
    reaped = time.monotonic()
    while True:
        time.sleep(1.0)
        for name, begin in services.items():
            if processes[name].poll() is not None:
                print(f"{name} ended ({processes[name].describe_exit()}); starting it again", flush=True)
                processes[name] = begin()
        if time.monotonic() - reaped >= REAP_S:
            reaped = time.monotonic()
            if (done := reap_all(registry)) != "nothing to reap":
                print(done, flush=True)


def _start_mlflow(lease: PortLease) -> Supervised:
    folder = home() / "mlflow"
    if not (folder / "mlflow.db").exists():  # in a process of its own: importing MLflow takes memory that the daemon keeps
        subprocess.run([sys.executable, "-m", "infra.tracking_mlflow", str(folder / "mlflow.db")], check=True)
    log = folder / "server.log"
    process = Supervised.start(mlflow_server.command(lease.port), env=mlflow_server.environment(), log=log, lease=lease.id)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not mlflow_server.healthy(f"http://127.0.0.1:{lease.port}"):
        if process.poll() is not None or time.monotonic() > deadline:
            process.stop()
            raise ServicesError(f"MLflow did not start: {process.describe_exit()}\n{process.log_tail()}")
        time.sleep(0.2)
    return process


def _start_worker(leases: LeaseManager) -> Supervised:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", WORKER]
    lease = leases.lease_process("Prefect worker")
    return Supervised.start(command, env=None, log=home() / "prefect" / "worker.log", lease=lease.id, grace_s=WORKER_GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
