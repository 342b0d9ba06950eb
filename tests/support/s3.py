"""A real S3 server on loopback (`rclone serve s3`) whose objects lie as files in a folder that tests can damage, and a link
to it that stops after so many bytes.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

ACCESS_KEY, SECRET_KEY = "LOOPWRIGHTTESTKEY001", "a-test-secret-of-forty-characters-000000"
RCLONE = Path(sys.executable).with_name("rclone")


class S3Server:
    """Bucket `runs`, in `folder`. `stop` and `start` keep the port; `freeze` makes it hang, connections and all."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder, folder / "runs"
        self.folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder.with_name("rclone.log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, secret: str = SECRET_KEY) -> dict[str, str]:
        """What a process needs to use it; nothing of the machine's own settings is looked at."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self, secret: str = SECRET_KEY) -> None:
        arguments = ["--addr", f"127.0.0.1:{self.port}", "--config", os.devnull]
        # By the environment: a command line shows in every list of processes.
        environment = {**os.environ, "RCLONE_AUTH_KEY": f'"{ACCESS_KEY},{secret}"'}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(RCLONE), "serve", "s3", *arguments, str(self.root)], stdout=log, stderr=log, env=environment
            )
        wait_until(self._answers, 30, "the S3 server's port")

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self._process is not None, "it is stopped"
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def down(self) -> Iterator[Path]:
        """The bucket's folder while the server is away, to damage objects in: while it is up, it remembers sizes."""
        self.stop()
        try:
            yield self.folder
        finally:
            self.start()

    def files(self, prefix: str = "") -> dict[str, int]:
        """Key and size of every object."""
        found = {str(path.relative_to(self.folder)): path.stat().st_size for path in self.folder.rglob("*") if path.is_file()}
        return {key: size for key, size in sorted(found.items()) if key.startswith(prefix)}


class Link:
    """A TCP way to the server that lets only so many bytes through in the direction of the server, until it is opened."""

    def __init__(self, port: int) -> None:
        self._to, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = 0
        self._limit: int | None = None
        self._lock, self._closed = threading.Condition(), False
        self._threads = [threading.Thread(target=self._accept, name="link")]
        self._threads[0].start()

    def let_through(self, count: int) -> None:
        with self._lock:
            self._limit = self.passed + count

    def open(self) -> None:
        with self._lock:
            self._limit = None
            self._lock.notify_all()

    @property
    def full(self) -> bool:
        """Whether somebody waits for the link to be opened."""
        with self._lock:
            return self._limit is not None and self.passed >= self._limit

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        # Closing alone does not wake a thread that accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), thread.name

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="link connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._to))
        with client, server, suppress(OSError), selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while not self._closed:
                for key, _ in ready.select(0.05):
                    source, target = key.fileobj, key.data
                    data = source.recv(1 << 14)  # type: ignore[union-attr]
                    if not data or (source is client and not self._may_pass(len(data))):
                        return
                    target.sendall(data)

    def _may_pass(self, count: int) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._closed or self._limit is None or self.passed < self._limit)
            self.passed += count
            return not self._closed


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of the test's own, whose address and keys are in the environment."""
    server = S3Server(tmp_path / "s3")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.root, ignore_errors=True)
