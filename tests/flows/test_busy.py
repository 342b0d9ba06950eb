"""When a server's GPUs count as busy."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from flows.busy import Busy, has_requests
from infra.errors import ServerUnreachable

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_running{engine="1",model_name="m"} RUNNING
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} WAITING
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:prompt_tokens_total{engine="0"} 123.0
"""


def page(running: str = "0.0", waiting: str = "0.0") -> str:
    return PAGE.replace("RUNNING", running).replace("WAITING", waiting)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Servers:
    """Two servers, one of them of two GPUs, a third without any."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.gpus = {"http://a": 1, "http://b": 2, "http://cpu": 0}
        self.pages: dict[str, str] = {url: page() for url in self.gpus}
        self.asked: list[str] = []
        self.busy = Busy(lambda: self.gpus, "key", self._page, self.clock)

    def _page(self, url: str) -> str:
        self.asked.append(url)
        if url not in self.pages:
            raise ServerUnreachable("nothing answers")
        return self.pages[url]

    def look_after(self, seconds: float) -> float:
        self.clock.now += seconds
        self.busy.look()
        return self.busy.seconds


def test_what_a_page_tells() -> None:
    assert not has_requests(page())
    assert has_requests(page(running="3.0")) and has_requests(page(waiting="1.0"))
    assert not has_requests("not a page")


def test_gpus_are_busy_while_requests_run_and_half_of_the_time_between_two_looks_that_differ() -> None:
    servers = Servers()
    assert servers.look_after(0) == 0
    servers.pages["http://b"] = page(running="5.0")
    assert servers.look_after(10) == pytest.approx(10)  # 2 GPUs for half of 10 s
    assert servers.look_after(10) == pytest.approx(30)
    servers.pages["http://a"] = page(waiting="1.0")
    del servers.pages["http://b"]  # it hangs
    assert servers.look_after(10) == pytest.approx(30 + 5 + 10)
    servers.gpus.pop("http://a")  # taken away
    assert servers.look_after(10) == pytest.approx(45)
    servers.gpus["http://a"] = 1  # another one, at the same address: nothing is known of what was between
    assert servers.look_after(100) == pytest.approx(45)
    assert "http://cpu" not in servers.asked
    servers.busy.close()


@pytest.fixture
def keyed_server() -> Iterator[str]:
    """Answers /metrics to those who have the key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            able = self.path == "/metrics" and self.headers["Authorization"] == "Bearer the-key"
            self.send_response(200 if able else 401)
            self.end_headers()
            self.wfile.write(page(running="1.0").encode() if able else b"")

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_real_page_is_asked_for_with_the_key(keyed_server: str) -> None:
    for key, expected in (("the-key", 10.0), ("another", 0.0)):
        clock = Clock()
        busy = Busy(lambda: {keyed_server: 1}, key, clock=clock)
        busy.look()
        clock.now += 10
        busy.look()
        busy.close()
        assert busy.seconds == expected
