"""`loopwright servers` beside a flow that trains: what is shown, asked and refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flows.cli import cli
from flows.config import GRPORunConfig
from flows.runs import open_run
from flows.server_requests import Requests, ServersRefused
from infra.errors import ServerUnreachable
from infra.registry import Owner, Registry
from trainers.roster import Listed, Serving, write_servers, write_serving


@pytest.fixture
def folder(home: Path, tmp_path: Path, config: Callable[..., GRPORunConfig]) -> Path:
    """Of the run `test`, which this process owns."""
    row, _ = open_run(Registry(), config(storage={"uri": str(tmp_path / "runs")}), "train-grpo")
    path = Path(str(row.output_dir))
    path.mkdir(parents=True)
    return path


@pytest.fixture
def healthy() -> Iterator[str]:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def loopwright(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["servers", *arguments])


def test_the_list_says_who_answers_and_what_each_serves(folder: Path, healthy: str, unused_port: int) -> None:
    gone = f"http://127.0.0.1:{unused_port}"
    write_servers(folder, [Listed("student-0", healthy), Listed("student-1", gone), Listed("student-2", f"{gone}/new")])
    write_serving(folder, [Serving("student-0", healthy, 7), Serving("student-1", gone, None, "connection refused")])
    lines = [line.split() for line in loopwright("list", "test").output.splitlines()]
    assert lines[1] == ["student-0", healthy, "up", "7"]
    assert lines[2] == ["student-1", gone, "no", "answer", "connection", "refused"]
    assert lines[3][-5:] == ["not", "with", "the", "trainer", "yet"]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["add", "test"], ("add", None, 1)),
        (["add", "test", "--count", "3"], ("add", None, 3)),
        (["remove", "test", "--url", "http://a:1"], ("remove", "http://a:1", 1)),
        (["add", "test", "--url", "name:big"], ("add", "http://kept:1", 1)),
        (["remove", "test", "--url", "name:big"], ("remove", "http://kept:1", 1)),
    ],
)
def test_what_the_flow_is_asked_and_answers(folder: Path, arguments: list[str], asked: tuple[str, str | None, int]) -> None:
    Registry().record_server(None, "big", "http://kept:1", 1, details={"key": "file"})
    seen, over = [], threading.Event()

    def flow() -> None:
        requests = Requests(folder)
        while not seen and not over.wait(0.01):
            for request in requests.take():
                seen.append((request.action, request.url, request.count))
                requests.answer(request, True, "it was done")

    thread = threading.Thread(target=flow)
    thread.start()
    result = loopwright(*arguments)
    over.set()
    thread.join()
    assert result.output == "it was done\n" and result.exit_code == 0 and seen == [asked]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "test", "--url", "http://a", "--count", "1"], "not both"),
        (["remove", "test", "--url", "localhost:1"], "starts with http"),
        (["add", "test", "--count", "0"], "--count"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(folder: Path, arguments: list[str], message: str) -> None:
    result = loopwright(*arguments)
    assert result.exit_code == 2 and message in result.output


def test_a_name_by_which_no_server_is_kept_is_said(folder: Path) -> None:
    with pytest.raises(ServerUnreachable, match=r"no server is kept by the name 'big' \(kept: none is\)"):
        raise loopwright("add", "test", "--url", "name:big").exception or AssertionError


def test_a_run_that_is_over_has_no_servers(folder: Path) -> None:
    registry = Registry()
    run = registry.get_run("test")
    registry.update_run(run.id, owner=Owner(2**22 + 1, 1.0, Owner.current().host))
    with pytest.raises(ServersRefused, match="run test is not running"):
        raise loopwright("add", "test").exception or AssertionError
    registry.update_run(run.id, status="FINISHED", owner=None)
    with pytest.raises(ServersRefused, match=r"not running \(FINISHED\)"):
        raise loopwright("list", "test").exception or AssertionError
