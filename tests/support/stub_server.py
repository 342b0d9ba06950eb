"""A stub of vLLM's generate endpoint (aiohttp), for faults that a real server will not produce on request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web

EOS = 1


class StubServer:
    """Answers at once with two characters and EOS. Faults are taken from `faults`, one per request, before that.

    A fault is a status (`400`, `500`), `"reset"` (the connection is cut), `"hang"` (no answer), or `"abort"` (finish_reason).
    """

    def __init__(self, completion: str = "42", max_model_len: int = 64, generate: bool = True) -> None:
        self.faults: deque[int | str] = deque()
        self.requests: list[dict[str, Any]] = []
        self.version: str | None = None  # None: the version the request was salted with
        self.url = ""
        self.delay_s = 0.0
        self.metrics: str | None = None  # the page /metrics answers; None: there is none
        self.weights: str | None = None  # what /weight_info answers; None: there is none
        self.refuses: str | None = None  # the message of the 400 that every request gets
        self.locked = False  # refuses every key
        self.mute = False  # answers nothing about itself, as a server that hangs
        self.script: Callable[[list[int]], str] | None = None  # prompt ids → the completion, in place of the fixed one
        self._ids = [ord(char) + 4 for char in completion] + [EOS]
        self._max_model_len, self._generate = max_model_len, generate

    @asynccontextmanager
    async def run(self, port: int = 0) -> AsyncIterator[Self]:
        app = web.Application()
        self.routes(app)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._site = web.TCPSite(runner, "127.0.0.1", port)
        await self._site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/metrics", "/weight_info"):
            app.router.add_get(path, self._about)
        if self._generate:
            app.router.add_post("/inference/v1/generate", self._answer)
        app.router.add_post("/v1/completions", self._answer)

    async def stop_listening(self) -> None:
        """Whoever comes is refused; connections there are stay."""
        await self._site.stop()

    async def _models(self, request: web.Request) -> web.Response:
        if self.locked:
            raise web.HTTPUnauthorized
        return web.json_response({"data": [{"id": "policy", "max_model_len": self._max_model_len}]})

    async def _about(self, request: web.Request) -> web.Response:
        if self.mute:
            await asyncio.sleep(3600)
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics" and self.metrics is not None:
            return web.Response(text=self.metrics)
        if request.path == "/weight_info" and self.weights is not None:
            return web.json_response({"weight_version": self.weights})
        raise web.HTTPNotFound

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body:
            return web.json_response({"error": {"message": "empty"}}, status=400)
        self.requests.append(body)
        if self.refuses is not None:
            return web.json_response({"error": {"message": self.refuses}}, status=400)
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": f"told to answer {fault}"}}, status=fault)
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        await asyncio.sleep(3600 if fault == "hang" else self.delay_s)
        return self._body(request, body, fault)

    def _body(self, request: web.Request, body: dict[str, Any], fault: int | str | None) -> web.Response:
        """The answer of a request that no fault met, `abort` aside."""
        limit = body["sampling_params"]["max_tokens"] if "sampling_params" in body else body["max_tokens"]
        ids = self._ids[:limit]
        if self.script is not None:
            prompt = body["token_ids"] if "token_ids" in body else body["prompt"]
            ids = ([ord(char) + 4 for char in self.script(prompt)] + [EOS])[:limit]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "abort" if fault == "abort" else "stop" if ids[-1:] == [EOS] else "length",
            "token_ids": ids,
        }
        if request.path == "/v1/completions":
            choice["logprobs"] = {
                "token_logprobs": [-0.25] * len(ids),
                "top_logprobs": [{f"token_id:{i}": -0.25} for i in ids],
            }
        else:
            sampled = [{"token_id": i, "logprob": -0.25} for i in ids]
            choice["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]} for entry in sampled]}
            version = self.version or body["cache_salt"]
            choice["weight_versions"] = [{"version": version, "start": 0, "end": len(ids)}] if ids else []
        return web.json_response({"choices": [choice]})
