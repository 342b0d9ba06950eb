"""Nothing of a server answers without its key but /health: the real one path by path, and the proxy before a Rust front end."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import httpx
import pytest

from infra.leases import LeaseManager
from infra.registry import Registry
from infra.vllm import PLUGIN, ServerSpec, start_server
from tests.support.key_tricks import HIDDEN, ask, let_through, raw
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import wait_until

KEY = "the-key-of-this-server"
WEBSOCKET = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")


def websocket(url: str, path: str, *headers: str) -> list[int]:
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [f"GET {path} HTTP/1.1", "Host: a", *WEBSOCKET, f"Sec-WebSocket-Key: {key}", *headers]
    return raw(url, "\r\n".join(lines) + "\r\n\r\n")


def every_path(url: str, key: str) -> list[str]:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        paths = client.get("/openapi.json").raise_for_status().json()["paths"]
    assert {"/pause", "/update_weights", "/collective_rpc", "/server_info", "/metrics", "/v1/models", "/health"} <= set(paths)
    return [*(path.replace("{", "").replace("}", "") for path in paths), *HIDDEN]


def check(url: str, key: str) -> None:
    assert let_through(url, key, every_path(url, key)) == []
    for path in ("/v1/realtime", "/health", "/"):
        assert websocket(url, path) in ([], [401], [403])
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        assert client.get("/is_paused").json() == {"is_paused": False}  # nothing of it did anything
    assert ask(url, "/health", "GET") == [200] and ask(url, "/health?x=/pause", "GET") == [200]


@pytest.mark.server
def test_the_real_server_wants_its_key_on_every_path(vllm_server):
    check(vllm_server.url, vllm_server.key)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_of_several_api_processes_wants_the_key(tmp_path):
    model = build_tiny_model(tmp_path / "tiny")
    spec = ServerSpec(str(model), name="two", device="cpu", extra_args=("--api-server-count", "2"))
    with LeaseManager(Registry(tmp_path / "registry.db")) as leases:
        server = start_server(spec, leases.lease_port(), key=KEY, log_path=tmp_path / "log")
        try:
            server.wait_ready(timeout_s=600)
            check(server.url, KEY)  # every connection goes to whichever process takes it
        finally:
            server.stop()


class Behind(BaseHTTPRequestHandler):
    """What a Rust front end answers, on a Unix socket; keeps what reached it."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, dict[str, str], bytes]]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, dict(self.headers), body))
        status, answer = 200, b'{"path": "' + self.path.encode() + b'"}'
        if self.path == "/collective_rpc":
            failing = json.loads(body)["kwargs"].get("update_info") == {"path": "bad"}
            status, answer = (500, b"no such file") if failing else (200, b'{"results": [{"version": "7"}]}')
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _answer

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


RUN_PROXY = """
import subprocess, sys
from loopwright_vllm import proxy
behind = subprocess.Popen(["sleep", "600"])
print(behind.pid, flush=True)
try:
    proxy.run("127.0.0.1", int(sys.argv[1]), sys.argv[2], behind)
finally:
    behind.kill()
"""


class Proxy:
    def __init__(self, url: str, seen: list[tuple[str, str, dict[str, str], bytes]], process: subprocess.Popen[str]) -> None:
        self.url, self.seen, self.process = url, seen, process
        assert process.stdout is not None
        self.behind_pid = int(process.stdout.readline())

    def call(self, method: str, path: str, **options) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=30, trust_env=False, **options)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    path = tmp_path_factory.mktemp("front") / "front"
    seen: list[tuple[str, str, dict[str, str], bytes]] = []
    handler = type("Handler", (Behind,), {"seen": seen})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(PLUGIN), "VLLM_API_KEY": KEY, "VLLM_SERVER_DEV_MODE": "1"}
    command = [sys.executable, "-c", RUN_PROXY, str(port), str(path)]
    with ThreadingUnixStreamServer(str(path), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            running = Proxy(f"http://127.0.0.1:{port}", seen, process)
            try:
                wait_until(lambda: up(running.url), what="the proxy")
                yield running
            finally:
                process.kill()
                os.kill(running.behind_pid, 9)
                server.shutdown()


def up(url: str) -> bool:
    try:
        return ask(url, "/health", "GET") == [200]
    except OSError:
        return False


def test_nothing_passes_the_proxy_without_the_key(proxy):
    proxy.seen.clear()
    assert let_through(proxy.url, KEY, ["/health", "/pause", "/collective_rpc", "/v1/models", "/metrics", *HIDDEN]) == []
    assert websocket(proxy.url, "/health") in ([], [401], [403])
    assert {(method, path) for method, path, *_ in proxy.seen} <= {("GET", "/health"), ("HEAD", "/health")}


def test_what_passes_the_proxy_arrives_as_it_was_sent(proxy):
    proxy.seen.clear()
    path = "/v1/completions?a=%2Fb&c=1"
    answer = proxy.call("POST", path, content=b'{"prompt": [1]}')
    assert (answer.status_code, answer.json()) == (200, {"path": path})
    (method, seen_path, headers, body) = proxy.seen[-1]
    assert (method, seen_path, body) == ("POST", path, b'{"prompt": [1]}')
    assert KEY not in json.dumps(headers)
    assert websocket(proxy.url, "/v1/realtime", f"Authorization: Bearer {KEY}") in ([], [403])


def test_a_sync_through_the_proxy_pauses_updates_and_resumes(proxy):
    proxy.seen.clear()
    update = {"path": "w.safetensors"}
    answer = proxy.call("POST", "/loopwright/sync", json={"update_info": update, "version": "7"})
    assert answer.status_code == 200 and answer.json()["workers"] == [{"version": "7"}]
    assert [path for _, path, *_ in proxy.seen] == ["/pause?mode=keep&clear_cache=true", "/collective_rpc", "/resume"]
    assert json.loads(proxy.seen[1][3]) == {"method": "loopwright_update", "args": [], "kwargs": {"update_info": update}}
    assert proxy.call("GET", "/loopwright/sync").json() == {"protocol": 1, "workers": [{"version": "7"}]}


def test_a_failed_update_through_the_proxy_leaves_nothing_paused(proxy):
    proxy.seen.clear()
    answer = proxy.call("POST", "/loopwright/sync", json={"update_info": {"path": "bad"}, "version": "8"})
    assert answer.status_code == 500 and "/collective_rpc answered 500: no such file" in answer.json()["error"]
    assert proxy.seen[-1][1] == "/resume"


def test_the_proxy_needs_a_key_to_start(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | {"PYTHONPATH": str(PLUGIN)}
    code = "import asyncio, sys; from loopwright_vllm import proxy; asyncio.run(proxy.serve('127.0.0.1', 0, sys.argv[1], None))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "refuses to run without a key" in done.stderr


def test_the_proxy_ends_with_the_server_behind(tmp_path):
    env = os.environ | {"PYTHONPATH": str(PLUGIN), "VLLM_API_KEY": KEY, "VLLM_SERVER_DEV_MODE": "1"}
    code = RUN_PROXY.replace('["sleep", "600"]', '["sleep", "0.5"]')
    done = subprocess.run(
        [sys.executable, "-c", code, "0", str(tmp_path / "s")], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_chat_template_is_given_to_the_rust_front_end_without_marks_for_training(tmp_path, monkeypatch):
    sys.path.insert(0, str(PLUGIN))
    from loopwright_vllm.serve import plain_template, split

    model = build_tiny_model(tmp_path / "tiny")
    (tmp_path / "private").mkdir()
    flag, path = plain_template(str(model), tmp_path / "private")
    text = Path(path).read_text()
    assert flag == "--chat-template" and "generation %}" not in text and "message['content'] + '<eos>'" in text
    assert plain_template(str(tmp_path / "no-model"), tmp_path) == []
    # Among the tokenizer's settings, alone or by name, of a folder or of a model at the hub.
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    fetched = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: fetched.append(name) or str(model))
    marked = "{% generation %}a{%- endgeneration -%}b"
    for given in (marked, [{"name": "tools", "template": "x"}, {"name": "default", "template": marked}]):
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": given}))
        for name in (str(model), "somebody/a-model"):
            assert Path(plain_template(name, tmp_path / "private")[1]).read_text() == "ab"
    assert fetched == ["somebody/a-model"] * 2
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert plain_template(str(model), tmp_path / "private") == []
    assert split(["m", "--port", "7", "--x", "1", "--host=::1"]) == ("::1", 7, ["m", "--x", "1"])


def test_a_stopped_proxy_ends_the_server_behind_and_leaves_no_folder_and_no_argument_takes_it_away(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f"""#!/bin/sh
trap 'touch {tmp_path}/ended; exit 0' TERM
echo "$@" > {tmp_path}/given; mv {tmp_path}/given {tmp_path}/up
while :; do sleep 0.05; done
""")
    fake.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(PLUGIN), "VLLM_API_KEY": KEY, "VLLM_USE_RUST_FRONTEND": "1"}
    code = f"import sys; sys.executable = {str(fake)!r}; from loopwright_vllm import serve; sys.exit(serve.main())"
    command = [sys.executable, "-c", code, "model", "--port", str(port), "--uds", str(tmp_path / "open")]
    url = f"http://127.0.0.1:{port}"

    def stands_before_nothing() -> bool:
        with suppress(ConnectionError):
            return ask(url, "/health", "GET") == [502]
        return False

    with subprocess.Popen(command, env=env | {"TMPDIR": str(tmp_path / "temporary")}) as process:
        try:
            wait_until((tmp_path / "up").exists)
            wait_until(stands_before_nothing)
            assert ask(url, "/v1/models", "GET") == [401]
            given = (tmp_path / "up").read_text().split()
            assert given[-2] == "--uds" and given[-1].startswith(str(tmp_path / "temporary"))
        finally:
            process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    assert (tmp_path / "ended").exists() and not list((tmp_path / "temporary").iterdir())


def test_the_server_behind_the_proxy_is_vllm_s_own(monkeypatch):
    sys.path.insert(0, str(PLUGIN))
    from loopwright_vllm import serve

    given = []
    monkeypatch.setattr(serve, "run_vllm", given.append)
    monkeypatch.setattr(sys, "argv", ["serve", serve.BEHIND, "model", "--uds", "front"])
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert serve.main() == 0 and given == [["model", "--uds", "front"]]
