"""Which Prefect API a process uses: the one the user names, the one of `loopwright up`, else one of its own.

The embedded server is Prefect's own application, started here instead of through `PREFECT_SERVER_EPHEMERAL_ENABLED`: that
one listens on an unleased port, has no UI, and outlives a caller that is killed; a supervised one does none of this. Several
embedded servers may share the database in `<LOOPWRIGHT_HOME>/prefect`; only their start (migrations) is one at a time.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from flows.connections import client_environment, running
from infra.home import home
from infra.leases import LeaseManager, PortLease
from infra.process import Supervised
from infra.redaction import redact
from infra.registry import Registry
from trainers.errors import ServerError

START_TIMEOUT_S = 600.0  # one that ends is noticed at once; on a machine at its limit it may take minutes
ANSWER_S = 60.0
_own: list[Supervised] = []  # the server that `api` started for this process


class PrefectServerError(ServerError):
    """Prefect's server did not come up, or the one that is named does not answer."""


def settings(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Prefect's settings for a server on this machine's `port`, and for its clients."""
    folder = home() / "prefect"
    folder.mkdir(mode=0o700, exist_ok=True)
    url = f"http://{host}:{port}"
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(folder / "memo_store.toml"),
        "DO_NOT_TRACK": "1",
    }


def start_server(lease: PortLease, auth: str | None = None) -> Supervised:
    """A Prefect server with its UI on a leased port, healthy. It ends with this process. `auth`: what it asks clients for.

    Its database is the file in `<home>/prefect`, or what PREFECT_SERVER_DATABASE_CONNECTION_URL names.

    Raises:
        PrefectServerError: it ended or was not healthy in time; the message has the end of its log.
    """
    environment = settings(lease.port, lease.host)
    if auth is not None:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = auth
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.prefect_app:create_app"]
    command += ["--host", lease.host, "--port", str(lease.port), "--log-level", "error", "--lifespan", "on"]
    log = home() / "prefect" / f"server-{lease.port}.log"
    with _start_lock():
        process = Supervised.start(command, env={**os.environ, **environment}, log=log, lease=lease.id)
        _wait_healthy(process, environment["PREFECT_API_URL"])
    return process


@contextmanager
def api() -> Iterator[str]:
    """Make this process use an API and yield its address. Must come before `prefect` is imported for the first time.

    Raises:
        PrefectServerError: the server that PREFECT_API_URL names does not answer, or one of this process's own does not start.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        _check_answers(url)
        yield url
        return
    up = running()
    if up is not None:
        if up.prefect_port is not None:
            os.environ.update(settings(up.prefect_port, up.host))
        os.environ.update({"PREFECT_API_URL": up.prefect_url, **client_environment(up)})
        yield up.prefect_url
        return
    with LeaseManager(Registry()) as leases:
        lease = leases.lease_port()
        process = start_server(lease)
        _own.append(process)
        environment = settings(lease.port)
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            yield environment["PREFECT_API_URL"]
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _own.remove(process)
            process.stop()


def _check_answers(url: str) -> None:
    """Whatever it answers: who may do what is between Prefect's client and it."""
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PrefectServerError(
            f"no Prefect server answers at PREFECT_API_URL={redact(url)} ({error}): mend the address or start the server; "
            "without the variable that of `loopwright up` is used, else one of this process's own"
        ) from error


def own_server_is_gone() -> bool:
    """Whether this process started its server itself and that one has ended: nobody will start it again."""
    return any(process.poll() is not None for process in _own)


def _wait_healthy(process: Supervised, url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PrefectServerError(f"Prefect's server ended: {process.describe_exit()}\n{process.log_tail()}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    process.stop()
    raise PrefectServerError(f"Prefect's server was not healthy within {START_TIMEOUT_S:.0f} s; its log is {process.log_path}")


@contextmanager
def _start_lock() -> Iterator[None]:
    folder = home() / "locks"
    folder.mkdir(exist_ok=True)
    with Path(folder, "prefect-start").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
