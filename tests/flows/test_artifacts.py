"""A flow that has ended waits for Prefect's server, unless there is nobody who would start it again."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from flows import artifacts, prefect_api
from tests.support.waiting import wait_until


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


class Ended:
    def poll(self) -> int:
        return -9


class Address:
    def __init__(self, port: int) -> None:
        self.port = port

    def value(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"


def test_it_returns_when_the_server_answers(
    monkeypatch: pytest.MonkeyPatch, unused_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    address = Address(unused_port)
    monkeypatch.setattr(artifacts, "PREFECT_API_URL", address)
    waiting = threading.Thread(target=artifacts.wait_for_prefect)
    waiting.start()
    wait_until(lambda: "is out of reach" in caplog.text, what="it waits")
    assert waiting.is_alive()
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address.port = server.server_address[1]
        monkeypatch.setattr(artifacts, "_answers", lambda url, real=artifacts._answers: real(address.value()))
        waiting.join(60)
        server.shutdown()
    assert not waiting.is_alive()


def test_a_server_of_its_own_that_has_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, unused_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artifacts, "PREFECT_API_URL", Address(unused_port))
    monkeypatch.setattr(prefect_api, "_own", [Ended()])
    artifacts.wait_for_prefect()
    assert "told to nobody" in caplog.text
    artifacts.wait_for_prefect(patience_s=0.0)
