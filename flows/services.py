"""`loopwright up`: Prefect, MLflow and a worker on one machine, kept by one daemon.

    loopwright up ──starts──▶ python -m flows.services      own session, outlives the command; owns the rest
                                ├─ Prefect server           supervised: gone within a second of the daemon, however it ends
                                ├─ MLflow server
                                ├─ Prefect worker           its flow runs are its children
                                └─ every 30 s: reap, restart what died

`up.json` in the Loopwright home names the daemon (pid and start time) and the addresses; it is written when all is ready.
Everything listens on loopback, or with `--shared` on one private address, where Prefect and MLflow ask for a key. A server that
the environment names (PREFECT_API_URL, MLFLOW_TRACKING_URI) is used instead of one of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from flows import prefect_api
from flows.connections import Up, client_environment, last, running, up_file
from flows.leftovers import Leftovers
from flows.reaping import reap_all
from flows.sharing import shared_host
from infra import mlflow_server
from infra.errors import PortTaken
from infra.home import home
from infra.keys import keys_file, read_keys
from infra.leases import LeaseManager, PortLease
from infra.outbox import write_atomically
from infra.process import Supervised, alive, current_owner
from infra.redaction import redact, redact_logs
from infra.registry import Registry
from trainers.errors import ConfigError, LoopwrightError

POOL = "loopwright"
WORKER = f"worker-{socket.gethostname()}"
REAP_S = 30.0
OLD_PORT_S = 70.0  # the system keeps the port of a killed server for a minute where clients were connected
WORKER_POLL_S = "2"  # Prefect's own 10 s is for many workers on one server; a run that is triggered waits for it
WORKER_GRACE_S = 40.0  # a flow run that is stopped with its worker lets its trainer write a checkpoint
READY_TIMEOUT_S = 600.0  # a service that ends is noticed at once; one on a machine at its limit may take minutes
STOP_TIMEOUT_S = 120.0
PREFECT_PORT, MLFLOW_PORT = 4200, 5000  # of shared services, whose addresses others write down
# What only the servers need: flows run other people's code.
SERVERS_ONLY = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL", mlflow_server.BACKEND_VARIABLE)


class ServicesError(LoopwrightError):
    """`up` or `down` did not get where it should; the message names the log."""

    failure_class = "infrastructure"


def start(
    shared: bool = False, host: str | None = None, prefect_port: int | None = None, mlflow_port: int | None = None
) -> list[tuple[str, str]]:
    """Start the daemon and wait until everything is ready; the addresses. Already up: just the addresses.

    Args:
        shared: listen on `host` and ask for keys.
        host: default the machine's one private address; loopback unless shared.
        prefect_port, mlflow_port: default 4200 and 5000 if shared, else any free ones. 0: any free one.

    Raises:
        ConfigError: the address is not a private one of this machine's, or it is up in the other way.
        ServicesError: with the end of the daemon's log.
    """
    if not shared and host is not None:
        raise ConfigError("--host is for --shared: without keys everything stays on loopback")
    if (up := running()) is not None:
        if shared and not up.shared:
            raise ConfigError("the services are up and not shared: `loopwright down` first")
    else:
        options = ["--shared", "--host", shared_host(host)] if shared else []
        for name, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
            options += [name, str(port)] if port is not None else []
        log = home() / "up.log"
        with log.open("wb") as output:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "flows.services", *options],
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
    rows = [
        ("Prefect", up.prefect_ui),
        ("MLflow", up.mlflow_url or f"{os.environ.get('MLFLOW_TRACKING_URI', 'elsewhere')} (not started here)"),
        ("worker", f"{up.worker} (work pool {POOL})"),
        ("daemon", f"process {up.pid}, log {home() / 'up.log'}"),
    ]
    if up.shared:
        rows.append(("keys", f"in {keys_file()}; `loopwright up --show-keys` prints what other machines set"))
    return rows


class Stopped(Exception):
    """SIGTERM or SIGINT came."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The daemon. Returns when it is told to stop, or at once if there is one already."""
    parser = argparse.ArgumentParser(prog="python -m flows.services")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--prefect-port", type=int)
    parser.add_argument("--mlflow-port", type=int)
    options = parser.parse_args(arguments)
    lock = (home() / "up.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped

    ours = "PREFECT_API_URL" not in os.environ
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    redact_logs()
    try:
        with ExitStack() as stack:
            _serve(stack, options)
    except Stopped:
        print("stopped", flush=True)
    except Exception:
        print(redact(traceback.format_exc()), flush=True)
        return 1
    finally:
        up_file().unlink(missing_ok=True)
        if ours:
            os.environ.pop("PREFECT_API_URL", None)  # it is gone by now
        print(reap_all(), flush=True)
    return 0


def _serve(stack: ExitStack, options: argparse.Namespace) -> None:
    """Start everything, then keep it running. Ends by an exception only."""
    registry = Registry()
    leases = stack.enter_context(LeaseManager(registry))
    print(reap_all(registry), flush=True)
    services: dict[str, Callable[[], Supervised]] = {}
    auth = read_keys().prefect_auth_string if options.shared else None
    prefect = mlflow = None
    if "PREFECT_API_URL" not in os.environ:
        prefect = _lease_port(leases, options, "prefect")
        services["Prefect"] = lambda: prefect_api.start_server(prefect, auth)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow = _lease_port(leases, options, "mlflow")
        services["MLflow"] = lambda: _start_mlflow(mlflow, options.shared)
    services["worker"] = lambda: _start_worker(leases)
    pid, start_time = current_owner()
    up = Up(
        pid=pid,
        start_time=start_time,
        prefect_port=prefect.port if prefect else None,
        prefect_url=f"http://{prefect.host}:{prefect.port}/api" if prefect else os.environ["PREFECT_API_URL"],
        mlflow_url=f"http://{mlflow.host}:{mlflow.port}" if mlflow else None,
        worker=WORKER,
        host=options.host,
        shared=options.shared,
        tracked=mlflow is not None and (options.shared or mlflow_server.BACKEND_VARIABLE in os.environ),
    )
    if prefect is not None:
        os.environ.update(prefect_api.settings(prefect.port, prefect.host))
    os.environ.update(client_environment(up))
    processes: dict[str, Supervised] = {}
    stack.callback(lambda: [process.stop() for process in reversed(processes.values())])
    for name, begin in services.items():
        if name == "worker":
            subprocess.run([sys.executable, "-m", "flows.deployments"], check=True)
        processes[name] = begin()
        print(f"{name} started", flush=True)
    write_atomically(up_file(), json.dumps(asdict(up), indent=2).encode())
    reaped = time.monotonic()
    leftovers = Leftovers(registry)
    stack.callback(leftovers.close)
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
            if (folder := leftovers.send()) is not None:
                print(f"sending to MLflow what {folder} has left", flush=True)


def _lease_port(leases: LeaseManager, options: argparse.Namespace, what: str) -> PortLease:
    asked = getattr(options, f"{what}_port")
    if asked is None and options.shared:
        asked = PREFECT_PORT if what == "prefect" else MLFLOW_PORT
    if asked is None and (port := _last_port(what, options.host)) is not None:
        # Runs of a user's own wait for services that were killed at the address they know.
        deadline = time.monotonic() + OLD_PORT_S
        while time.monotonic() < deadline:
            with suppress(PortTaken):
                return leases.lease_port(port=port, host=options.host)
            time.sleep(1.0)
    try:
        return leases.lease_port(port=asked or None, host=options.host)
    except PortTaken as error:
        raise ServicesError(f"{error}; choose another by --{what}-port (0: any free one)") from error


def _last_port(what: str, host: str) -> int | None:
    """Of the services that were killed and not stopped."""
    up = last()
    if up is None or up.host != host:
        return None
    return up.prefect_port if what == "prefect" else urlsplit(up.mlflow_url or "").port


def _start_mlflow(lease: PortLease, shared: bool) -> Supervised:
    folder = home() / "mlflow"
    in_database = mlflow_server.BACKEND_VARIABLE in os.environ
    if not in_database and not (folder / "mlflow.db").exists():
        # In a process of its own: importing MLflow takes memory that the daemon keeps.
        subprocess.run([sys.executable, "-m", "infra.tracking_mlflow", str(folder / "mlflow.db")], check=True)
    log = folder / "server.log"
    command = mlflow_server.command(lease.port, host=lease.host, remote=shared or in_database)
    environment = {name: value for name, value in mlflow_server.environment().items() if name != "MLFLOW_TRACKING_URI"}
    if shared:
        command, environment = mlflow_server.guarded(command, environment)
    process = Supervised.start(command, env=environment, log=log, lease=lease.id)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not mlflow_server.healthy(f"http://{lease.host}:{lease.port}"):
        if process.poll() is not None or time.monotonic() > deadline:
            process.stop()
            raise ServicesError(f"MLflow did not start: {process.describe_exit()}\n{process.log_tail()}")
        time.sleep(0.2)
    return process


def _start_worker(leases: LeaseManager) -> Supervised:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", WORKER]
    lease = leases.lease_process("Prefect worker")
    environment = {name: value for name, value in os.environ.items() if name not in SERVERS_ONLY}
    environment.setdefault("PREFECT_WORKER_QUERY_SECONDS", WORKER_POLL_S)
    return Supervised.start(
        command, env=environment, log=home() / "prefect" / "worker.log", lease=lease.id, grace_s=WORKER_GRACE_S
    )


if __name__ == "__main__":
    sys.exit(main())
