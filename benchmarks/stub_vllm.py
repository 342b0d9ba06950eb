"""A vLLM that answers at once: `/v1/completions` from precomputed bodies, in a process of its own.

    python -m benchmarks.stub_vllm ANSWERS.json       prints its port; ends with SIGTERM

    request bytes ─▶ how many tool answers the prompt holds ─▶ that turn's next body ─▶ bytes

It reads no JSON: the prompt's ids are counted and echoed as bytes, so that it costs a small part of what either engine does.
ANSWERS.json: `marker` (the token id that opens a tool answer), `answers` (per turn, complete bodies; the stub fills in their
`"prompt_token_ids":[]`), `max_model_len`, `model`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any, Protocol, cast

import uvloop

ECHO = b'"prompt_token_ids":['
_KV_CACHE_TOKENS = 2**24  # never the reason to hold a rollout back


def response(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A whole HTTP/1.1 answer."""
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Script:
    """What to answer.

    Args:
        answers: see the module's docstring; the bodies of one turn are taken in turn.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self._marker = str(answers["marker"]).encode()
        self._turns = [itertools.cycle([tuple(body.encode().split(ECHO)) for body in turn]) for turn in answers["answers"]]
        model = {"id": answers["model"], "object": "model", "max_model_len": answers["max_model_len"]}
        gauges = (
            f'vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="{_KV_CACHE_TOKENS}",'
            f'num_gpu_blocks="{_KV_CACHE_TOKENS // 16}"}} 1.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:num_requests_running{engine="0"} 1.0\n'
        )
        self._pages = {
            b"GET /v1/models": response(json.dumps({"object": "list", "data": [model]}).encode()),
            b"GET /health": response(b""),
            b"GET /metrics": response(gauges.encode(), kind="text/plain"),
        }
        self._missing = response(b'{"detail":"Not Found"}', "404 Not Found")

    def answer(self, request: bytes, body: bytes) -> bytes:
        """The answer to a request of this first line and body."""
        if not request.startswith(b"POST /v1/completions"):
            return self._pages.get(b" ".join(request.split(b" ", 2)[:2]), self._missing)
        begin = body.index(b"[", body.index(b'"prompt"')) + 1
        ids = body[begin : body.index(b"]", begin)].replace(b" ", b"")
        turn = min(ids.count(self._marker), len(self._turns) - 1)
        head, tail = next(self._turns[turn])
        return response(head + ECHO + ids + tail)


class Answers(Protocol):
    """What a connection asks."""

    def answer(self, request: bytes, body: bytes) -> bytes: ...


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests carry a Content-Length."""

    def __init__(self, script: Answers) -> None:
        self._script, self._data = script, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            lower = head.lower()
            at = lower.find(b"content-length:")
            length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            self._transport.write(self._script.answer(head, body))


async def serve(script: Answers) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(lambda: Connection(script), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(serve(Script(json.loads(Path(sys.argv[1]).read_text()))))
