"""The key middleware alone, on hand-made ASGI scopes; the real server's paths are walked in test_vllm_server.py."""

from __future__ import annotations

import asyncio
import sys

import pytest

from infra.vllm import PLUGIN

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm.auth import KeyMiddleware

KEY = "s3cret-κ"
GOOD = f"Bearer {KEY}".encode()


@pytest.fixture
def middleware(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    async def app(scope, receive, send):
        await send({"type": "reached"})

    return KeyMiddleware(app)


def answer(middleware, path="/pause", headers=(), method="POST", kind="http") -> list[dict]:
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "method": method, "headers": list(headers)}
    asyncio.run(middleware(scope, None, send))
    return sent


def reached(*arguments, **options) -> bool:
    return answer(*arguments, **options) == [{"type": "reached"}]


@pytest.mark.parametrize("header", [GOOD, GOOD.replace(b"Bearer", b"bearer"), GOOD.replace(b"Bearer ", b"BEARER  ")])
def test_the_right_key(middleware, header):
    assert reached(middleware, headers=[(b"authorization", header)])
    assert reached(middleware, headers=[(b"Authorization", header)])


@pytest.mark.parametrize("header", [b"", b"Bearer ", GOOD[:-1], GOOD + b"x", KEY.encode(), b"Basic " + KEY.encode(), b"\xff"])
def test_a_wrong_key(middleware, header):
    sent = answer(middleware, headers=[(b"authorization", header)])
    assert sent[0]["status"] == 401
    assert b"VLLM_API_KEY" in sent[1]["body"] and KEY.encode() not in sent[1]["body"]


def test_two_authorization_headers_are_refused(middleware):
    assert not reached(middleware, headers=[(b"authorization", GOOD), (b"authorization", b"Bearer x")])


@pytest.mark.parametrize("path", ["/health/", "/health/x", "//health", "/Health", "/healthz", "/v1/../health", "/", "/metrics"])
def test_only_health_itself_is_open(middleware, path):
    assert reached(middleware, path="/health", method="GET")
    assert not reached(middleware, path=path, method="GET")
    assert not reached(middleware, path="/health", method="POST")


def test_preflight_requests_and_websockets_want_the_key_too(middleware):
    assert not reached(middleware, method="OPTIONS")
    assert answer(middleware, kind="websocket", path="/health")[0]["type"] == "websocket.close"
    assert reached(middleware, kind="websocket", headers=[(b"authorization", GOOD)])


def test_lifespan_passes(middleware):
    assert reached(middleware, kind="lifespan")


def test_without_a_key_the_server_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="refuses to run without a key"):
        KeyMiddleware(None)
