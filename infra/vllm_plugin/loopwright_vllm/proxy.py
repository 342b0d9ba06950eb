"""A key-checking proxy on this machine's network before a front end that listens on a Unix socket.

    request ─▶ KeyMiddleware (401) ─▶ /loopwright/sync ─▶ pause, update, resume over the socket
                                   └▶ everything else ──▶ passed on as it is, answers as they come

It ends when the server behind ends, and the server with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from types import SimpleNamespace
from typing import Any

import aiohttp
import uvicorn
from yarl import URL

from loopwright_vllm.auth import KeyMiddleware
from loopwright_vllm.control import read

# Of one connection only, or worked out anew for the other one.
NOT_PASSED_ON = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host", b"authorization", b"expect"}
)
BEHIND = "http://front"
WATCH_S = 0.25
GRACE_S = 5


class Upstream:
    """The server behind, as an ASGI application."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.session: aiohttp.ClientSession | None = None
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=RemoteEngine(self)))

    def connections(self) -> aiohttp.ClientSession:
        if self.session is None:
            self.session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=self.socket, limit=0, keepalive_timeout=4),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self.session

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "no websockets behind this proxy"})
            return
        path = scope["raw_path"].decode("ascii") + (
            "?" + scope["query_string"].decode("ascii") if scope["query_string"] else ""
        )
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"] if passed_on(name)]
        url = URL(BEHIND + path, encoded=True)
        body = await read(receive)
        gone = asyncio.create_task(disconnected(receive))
        passing = asyncio.create_task(self.pass_on(scope["method"], url, headers, body, send))
        try:
            # A caller that leaves is told to the server behind, which then stops generating.
            await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (gone, passing):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await passing

    async def pass_on(self, method: str, url: Any, headers: list[tuple[str, str]], body: bytes, send: Any) -> None:
        try:
            answer = await self.connections().request(method, url, headers=headers, data=body or None, allow_redirects=False)
        except aiohttp.ClientError as error:
            text = f'{{"error": "the server behind does not answer: {type(error).__name__}"}}'.encode()
            await send({"type": "http.response.start", "status": 502, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": text})
            return
        async with answer:
            given = [(name.lower(), value) for name, value in answer.raw_headers if passed_on(name.lower())]
            await send({"type": "http.response.start", "status": answer.status, "headers": given})
            async for part in answer.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class RemoteEngine:
    """What `control` needs of an engine, by the calls of the server behind."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.engine_core = self

    async def call(self, path: str, body: Any = None) -> Any:
        async with self.upstream.connections().post(BEHIND + path, json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RuntimeError(f"{path} answered {answer.status}: {text[:1000]}")
            return await answer.json(content_type=None) if text else None

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await self.call(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume_scheduler_async(self) -> None:
        await self.call("/resume")

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        answer = await self.call("/collective_rpc", {"method": method, "args": [], "kwargs": kwargs or {}})
        return answer["results"]


def passed_on(name: bytes) -> bool:
    return name not in NOT_PASSED_ON


async def disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def watch(server: uvicorn.Server, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        await asyncio.sleep(WATCH_S)
    server.should_exit = True


async def serve(host: str, port: int, socket: str, process: subprocess.Popen[bytes]) -> None:
    upstream = Upstream(socket)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = upstream.app
        await guarded(scope, receive, send)

    guarded = KeyMiddleware(upstream)
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    watching = asyncio.create_task(watch(server, process))
    try:
        await server.serve()
    finally:
        watching.cancel()
        await upstream.close()


def run(host: str, port: int, socket: str, process: subprocess.Popen[bytes]) -> None:
    """Until `process`, the server behind, ends or this process is told to."""
    asyncio.run(serve(host, port, socket, process))
