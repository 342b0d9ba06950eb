"""`POST /loopwright/sync`: a whole weight sync in one call, so that a pause lasts as long as the load and nothing longer.

    pause (requests kept, prefixes forgotten) ─▶ one call to the workers ─▶ version ─▶ resume, whatever happened
    request  {"update_info": {…}, "version": "7"}     answer  {"pause_s", "load_s", "workers": [state, …]}

`GET /loopwright/sync` answers {"protocol": 1, "workers": [state, …]}. Both lie behind the key (auth.py).
The server resumes by itself, so a trainer that dies in mid-sync leaves no paused server behind.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from loopwright_vllm import compat

PATH = "/loopwright/sync"
PROTOCOL = 1


class Control:
    """Innermost of our layers: answers `PATH`, passes everything else on."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        try:
            if scope["method"] == "POST":
                body = json.loads(await read(receive))
                async with self.lock:
                    status, answer = 200, await sync(engine, body["update_info"], str(body["version"]))
            else:
                status, answer = 200, {"protocol": PROTOCOL, "workers": await states(engine)}
        except (KeyError, ValueError) as error:
            status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            status, answer = 500, {"error": str(error)}
        await respond(send, status, answer)


async def sync(engine: Any, update_info: dict[str, Any], version: str) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        await compat.pause(engine)
        paused = time.perf_counter()
        workers = await engine.collective_rpc("loopwright_update", kwargs={"update_info": update_info})
        if update_info.get("last", True):
            await compat.set_version(engine, version)
        loaded = time.perf_counter()
    finally:
        await compat.resume(engine)
    return {
        "pause_s": paused - began,
        "load_s": loaded - paused,
        "workers": workers,
    }


async def states(engine: Any) -> list[dict[str, Any]]:
    return await engine.collective_rpc("loopwright_state")


async def read(receive: Any) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def respond(send: Any, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
