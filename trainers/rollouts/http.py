"""Requests to one server over keep-alive connections: the path every turn of every rollout takes.

    request ─▶ idle connection, else a new one ─▶ one write: head and body ─▶ status line, headers, body ─▶ idle again

HTTP/1.1 as servers of JSON speak it: `Content-Length`, chunked, or until the connection closes. A general client spends several
times as long on a request as this does, and turns are counted in thousands a second.

Invariants:
- a connection carries one request at a time, and is only used again after a whole answer that allows it;
- a caller that is cancelled takes its connection along: what the server still sends belongs to nobody.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from urllib.parse import urlsplit

IDLE_S = 4.0  # vLLM closes connections that were idle for 5 s: one reused at that moment would be reset
_MOST_HEAD_BYTES = 65_536


class ConnectFailed(ConnectionError):
    """No connection could be made."""


class BrokenAnswer(ConnectionError):
    """The connection ended, or what came over it is no HTTP answer."""


class _Connection(asyncio.Protocol):
    """One connection, and the answer that is being read from it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._status = 0  # 0: the head is not here yet
        self._length: int | None = None  # of the body; None: until the connection closes
        self._chunked = False
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), transport
        self.transport = transport

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `BrokenAnswer`."""
        assert self.transport is not None and self._answer is None, "one request at a time"
        self._answer = asyncio.get_running_loop().create_future()
        self._status, self._length, self._chunked, self.reusable = 0, None, False, False
        self._buffer.clear()
        self.transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._answer is None or self._answer.done():
            self.reusable = False  # nobody asked for that
            return
        try:
            if self._status or self._read_head():
                self._read_body()
        except (ValueError, IndexError) as error:
            self._fail(f"no HTTP answer: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        answer = self._answer
        if answer is None or answer.done():
            return
        if self._status and self._length is None and not self._chunked and error is None:
            answer.set_result((self._status, bytes(self._buffer)))
        else:
            self._fail(f"the connection ended before the answer did: {error or 'closed by the server'}")

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # Reading

    def _fail(self, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BrokenAnswer(message))
        self.abort()

    def _read_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MOST_HEAD_BYTES:
                    raise ValueError(f"its head is longer than {_MOST_HEAD_BYTES} bytes")
                return False
            lines = bytes(self._buffer[:end]).split(b"\r\n")
            del self._buffer[: end + 4]
            version, status = lines[0].split(b" ", 2)[:2]
            if not version.startswith(b"HTTP/1."):
                raise ValueError(f"it begins with {lines[0][:40]!r}")
            if int(status) >= 200:
                break  # 1xx announce another head
        headers = {
            name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        self._status = int(status)
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        if not self._chunked:
            length = headers.get(b"content-length")
            self._length = 0 if self._status in (204, 304) else None if length is None else int(length)
        close = headers.get(b"connection", b"keep-alive" if version == b"HTTP/1.1" else b"close")
        self.reusable = b"close" not in close
        return True

    def _read_body(self) -> None:
        if self._chunked:
            body = _joined_chunks(self._buffer)
            if body is None:
                return
            self._buffer.clear()
        elif self._length is None or len(self._buffer) < self._length:
            return
        else:
            body = bytes(self._buffer[: self._length])
            del self._buffer[: self._length]
        self.reusable = self.reusable and not self._buffer
        assert self._answer is not None
        self._answer.set_result((self._status, body))


def _joined_chunks(buffer: bytearray) -> bytes | None:
    """The body of a chunked answer; None: it is not whole yet. Raises `ValueError`: these are no chunks."""
    parts, at = [], 0
    while True:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(bytes(buffer[at:end]).split(b";")[0], 16)
        at = end + 2
        if size == 0:  # trailers, which nobody asked for, up to an empty line
            return b"".join(parts) if buffer.startswith(b"\r\n", at) or buffer.find(b"\r\n\r\n", at) >= 0 else None
        if len(buffer) < at + size + 2:
            return None
        parts.append(bytes(buffer[at : at + size]))
        at += size + 2


class HttpClient:
    """Connections to one server.

    Args:
        base_url: `http://` or `https://`, with or without a path.
        key: sent as `Authorization: Bearer …`.
        connect_s: seconds to wait for a connection.
    """

    def __init__(self, base_url: str, key: str | None, connect_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`{base_url}` is no URL of a server: write http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix, self._connect_s = parts.path.rstrip("/"), connect_s
        fields = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        fields += [f"Authorization: Bearer {key}"] if key else []
        self._fields = "".join(f"{field}\r\n" for field in fields).encode()
        self._idle: list[_Connection] = []  # the newest last
        self._closed = False

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            ConnectFailed: no connection could be made.
            BrokenAnswer: it ended before the answer did.
        """
        connection = self._take() or await self._connect()
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        try:
            answer = await connection.ask(b"".join((head, self._fields, b"\r\n", body)))
        except BaseException:
            connection.abort()
            raise
        if connection.reusable and connection.open and not self._closed:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since > oldest and connection.reusable:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {self._connect_s:.0f} s") from error
        except OSError as error:
            raise ConnectFailed(str(error)) from error
        return connection

    def close(self) -> None:
        """Close the idle connections; one in use is closed when its request ends."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()
