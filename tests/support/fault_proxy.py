"""A proxy in front of a real server that injects faults into its generation requests, each as often as told.

    client ══▶ FaultProxy ══▶ server           everything but a scripted fault passes unchanged

Runs on an event loop and a thread of its own, because the trainer's side of a test blocks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import aiohttp
from aiohttp import web

Fault = Literal["400", "500", "slow", "lost", "reset", "half", "bad_json"]
GENERATION = ("/inference/v1/generate", "/v1/completions")
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class FaultProxy:
    """`faults` are taken one per generation request.

    400, 500: that status, the server sees nothing. slow: the answer comes `slow_s` late; lost: never. reset: the connection is
    cut in place of the answer; half: in the middle of it. bad_json: half an answer that claims to be whole.
    """

    def __init__(self, upstream: str, slow_s: float = 3.0) -> None:
        self.upstream, self.slow_s = upstream.rstrip("/"), slow_s
        self.faults: deque[Fault] = deque()
        self.injected: Counter[str] = Counter()
        self.requests = 0  # generation requests that arrived
        self.answered = 0  # of these, answered as the server did
        self.looks = 0  # all other requests
        self.seen: list[tuple[str, str, int]] = []  # of a model: path, its name, status of the server's answer
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._port = 0

    @contextmanager
    def run(self) -> Iterator[FaultProxy]:
        thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")
        thread.start()
        try:
            self._do(self._start())
            yield self
        finally:
            self._do(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def go_away(self) -> None:
        """Close the listener and every connection: whoever comes is refused, until `come_back`."""
        self._do(self._leave())

    def come_back(self) -> None:
        """Listen again, on the same port."""
        self._do(self._listen())

    def _do(self, work) -> None:  # type: ignore[no-untyped-def]
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        )
        await self._listen()

    async def _stop(self) -> None:
        await self._leave()
        await self._session.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = await self._loop.create_server(self._runner.server, "127.0.0.1", self._port, reuse_address=True)
        self._port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def _leave(self) -> None:
        """By themselves asyncio and aiohttp each forget, open, a connection that was just accepted, or whose answer was just
        due; a process that died leaves none."""
        if self._runner.server is None:
            return
        for socket in self._listener.sockets:
            self._loop.remove_reader(socket.fileno())
        await asyncio.sleep(0.01)  # what was accepted gets among the connections
        self._listener.close()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault: Fault | None = None
        generates = request.path in GENERATION and len(body) > 2  # an empty one only asks whether the endpoint exists
        self.looks += not generates
        if generates:
            self.requests += 1
            fault = self.faults.popleft() if self.faults else None
        if fault is not None:
            self.injected[fault] += 1
        if fault in ("400", "500"):
            return web.json_response({"error": {"message": f"the proxy says {fault}"}}, status=int(fault))
        if fault == "reset":
            return self._cut(request)
        headers = {name: value for name, value in request.headers.items() if name in ("Authorization", "Content-Type")}
        url = self.upstream + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            content, status, kind = await answer.read(), answer.status, answer.content_type
        if generates or request.path in ADAPTERS:
            named = json.loads(body)
            self.seen.append((request.path, named.get("lora_name") or named.get("model", ""), status))
        if fault == "lost":
            await asyncio.sleep(3600)
        if fault == "slow":
            await asyncio.sleep(self.slow_s)
        if fault == "half":
            response = web.StreamResponse(status=status, headers={"Content-Length": str(len(content))})
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            return self._cut(request, response)
        if fault == "bad_json":
            content = content[: len(content) // 2]
        self.answered += generates and fault != "bad_json"
        return web.Response(body=content, status=status, content_type=kind)

    def _cut(self, request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        assert request.transport is not None
        # Otherwise what was written would be dropped with the connection.
        request.transport.abort() if response is None else request.transport.close()
        return response or web.Response()
