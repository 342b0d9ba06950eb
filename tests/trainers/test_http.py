"""The connections of turns, against a server that sends whatever bytes the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from trainers.rollouts.http import BrokenAnswer, ConnectFailed, HttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\nbody"


class Sender:
    """Answers each request with the next script: byte strings sent one by one; None closes the connection."""

    def __init__(self, *scripts: list[bytes | None]) -> None:
        self.scripts = list(scripts)
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[HttpClient]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(self.url + "/base/", "secret", 5.0)
        try:
            yield client
        finally:
            client.close()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for part in self.scripts.pop(0):
                    if part is None:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)  # parts arrive apart
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def test_what_is_sent_and_that_the_connection_is_kept() -> None:
    sender = Sender([PLAIN], [PLAIN])
    async with sender.run() as client:
        assert await client.request("POST", "/path", b'{"a": 1}') == (200, b"body")
        assert await client.request("POST", "/path", b"") == (200, b"body")
    assert sender.connections == 1
    head, _, body = sender.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/path HTTP/1.1\r\n") and body == b'{"a": 1}'
    assert b"Authorization: Bearer secret\r\n" in head + b"\r\n" and b"Host: 127.0.0.1:" in head


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ([PLAIN[:9], PLAIN[9:70], PLAIN[70:]], (200, b"body")),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", PLAIN], (200, b"body")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"], (500, b"")),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nbod\r", b"\n1;x=y\r\ny\r\n0\r\n", b"\r\n"],
            (200, b"body"),
        ),
        ([CHUNKED + b"4\r\nbody\r\n0\r\nT: 1\r\n\r\n"], (200, b"body")),
        ([b"HTTP/1.1 200 OK\r\n\r\nbo", b"dy", None], (200, b"body")),
    ],
)
async def test_every_way_an_answer_may_end(parts: list[bytes | None], answer: tuple[int, bytes]) -> None:
    async with Sender(parts).run() as client:
        assert await client.request("POST", "/", b"{}") == answer


@pytest.mark.parametrize(
    "parts",
    [
        [None],
        [PLAIN[:-2], None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbo", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"SSH-2.0-server\r\n\r\n"],
        [b"x" * 70_000],
        [b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"],
    ],
)
async def test_an_answer_that_is_none_is_an_error(parts: list[bytes | None]) -> None:
    sender = Sender(parts, [PLAIN])
    async with sender.run() as client:
        with pytest.raises(BrokenAnswer):
            await client.request("POST", "/", b"{}")
        assert await client.request("POST", "/", b"{}") == (200, b"body")  # over another connection
    assert sender.connections == 2


@pytest.mark.parametrize(
    "first",
    [
        PLAIN.replace(b"content-type", b"Connection: close\r\ncontent-type"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN + b"more than was said",
    ],
)
async def test_a_connection_that_may_not_go_on_is_not_used_again(first: bytes) -> None:
    sender = Sender([first], [PLAIN])
    async with sender.run() as client:
        assert await client.request("POST", "/", b"{}") == (200, b"body")
        assert await client.request("POST", "/", b"{}") == (200, b"body")
    assert sender.connections == 2


async def test_a_request_given_up_takes_its_connection_along() -> None:
    """The answer that comes late must not be taken for the next request's."""
    late = PLAIN.replace(b"body", b"late")
    sender = Sender([late[:20]], [PLAIN])
    async with sender.run() as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.request("POST", "/", b"{}")
        assert await client.request("POST", "/", b"{}") == (200, b"body")
    assert sender.connections == 2


async def test_requests_side_by_side_have_a_connection_each() -> None:
    sender = Sender(*[[PLAIN]] * 8)
    async with sender.run() as client:
        assert await asyncio.gather(*(client.request("POST", "/", b"{}") for _ in range(8))) == [(200, b"body")] * 8
    assert sender.connections == 8


async def test_nobody_listens() -> None:
    client = HttpClient("http://127.0.0.1:9", None, 5.0)
    with pytest.raises(ConnectFailed):
        await client.request("POST", "/", b"{}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        HttpClient(url, None, 5.0)
