"""Student servers of a run: replaced when they die, added and taken away, as the trainer and the registry see it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.config import GRPORunConfig
from flows.runs import open_run
from flows.server_health import Pulse
from flows.server_requests import ServersRefused, ask
from flows.student import Student
from flows.students import Students
from infra.errors import ServerStartFailed, ServerUnreachable
from infra.leases import LeaseManager
from infra.registry import Registry
from tests.flows.fake_places import FakePlace
from trainers.errors import ServerCapabilityError
from trainers.roster import Serving, read_servers, write_serving


class Run:
    """Students over fake places; `scripts` by the place's name, `sick` the URLs that do not answer."""

    def __init__(self, config: Callable[..., GRPORunConfig], folder: Path, **fields: Any) -> None:
        self.scripts: dict[str, list[str]] = fields.pop("scripts", {})
        self.places: dict[str, FakePlace] = {}
        self.sick: set[str] = set()
        self.refused: dict[str, Exception] = {}
        self.free = 100
        settings = config(storage={"uri": str(folder)}, **fields)
        registry = Registry()
        self.row, _ = open_run(registry, settings, "train-grpo")
        self.folder = Path(str(self.row.output_dir))
        self.students = Students(
            settings,
            self.row,
            registry,
            LeaseManager(registry),
            make=self._make,
            check=self._check,
            pulse=Pulse(lambda url: url not in self.sick, every_s=0.0),
        )

    def _make(self, name: str) -> FakePlace:
        self.free -= 1
        self.places[name] = FakePlace(name, self.scripts.get(name), free=self.free >= 0)
        return self.places[name]

    def _check(self, url: str) -> None:
        if url in self.refused:
            raise self.refused[url]

    def begin(self) -> Run:
        self.students.lease()
        self.students.ensure()
        return self

    @property
    def listed(self) -> list[str]:
        return [f"{server.name} {server.url.removeprefix('http://127.0.0.1/')}" for server in read_servers(self.folder)]

    def tend_until(self, condition: Callable[[], Any]) -> str | None:
        deadline = time.monotonic() + 20
        while True:
            gone = self.students.tend()
            if condition():
                return gone
            assert time.monotonic() < deadline, f"in vain; listed: {self.listed}"
            time.sleep(0.01)

    def ask(self, action: Any, url: str | None = None, count: int = 1) -> str:
        """What the command's process is told, with the flow's loop running meanwhile."""
        told: list[Any] = []

        def command() -> None:
            try:
                told.append(ask(self.folder, action, url, count, 20))
            except ServersRefused as error:
                told.append(error)

        thread = threading.Thread(target=command)
        thread.start()
        self.tend_until(lambda: told)
        thread.join()
        if isinstance(told[0], Exception):
            raise told[0]
        return told[0]


@pytest.fixture
def run(home: Path, tmp_path: Path, config: Callable[..., GRPORunConfig]) -> Any:
    made: list[Run] = []

    def make(**fields: Any) -> Run:
        made.append(Run(config, tmp_path / "runs", **fields))
        return made[-1]

    yield make
    for one in made:
        one.students.stop()


def test_several_servers_are_started_listed_and_named_to_the_trainer(run: Any) -> None:
    made = run(servers={"student": {"count": 3}}).begin()
    assert made.listed == ["student-0 student-0/1", "student-1 student-1/1", "student-2 student-2/1"]
    urls = [f"http://127.0.0.1/student-{i}/1" for i in range(3)]
    assert made.students.config_fields() == {"vllm_server_base_url": urls}
    assert [row["name"] for row in made.students.rows()] == ["student-0", "student-1", "student-2"]
    assert len(made.students.environment()["VLLM_API_KEY"]) > 20
    assert made.students.tend() is None


def test_one_server_is_named_as_before(run: Any) -> None:
    assert run().begin().students.config_fields() == {"vllm_server_base_url": "http://127.0.0.1/student-0/1"}


def test_a_server_that_dies_leaves_the_list_at_once_and_its_replacement_comes_when_it_is_ready(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(servers={"student": {"count": 2}}, scripts={"student-0": ["up", "waits"]}).begin()
    made.places["student-0"].die()
    assert "SIGKILL" in str(made.students.death())
    assert made.students.tend() is None and made.listed == ["student-1 student-1/1"] and made.students.death() is None
    made.tend_until(lambda: made.places["student-0"].starts == 2)
    assert made.listed == ["student-1 student-1/1"]
    made.places["student-0"].go.set()
    made.tend_until(lambda: len(made.listed) == 2)
    assert made.listed == ["student-0 student-0/2", "student-1 student-1/1"]
    shown = capsys.readouterr().out
    assert "student-0 died: killed by SIGKILL" in shown and "last words" in shown and "2 replacements are left" in shown


def test_the_only_server_is_waited_for_and_the_trainer_keeps_its_list(run: Any) -> None:
    made = run(scripts={"student-0": ["up", "waits"]}).begin()
    made.places["student-0"].die()
    made.tend_until(lambda: made.places["student-0"].starts == 2)
    assert made.listed == ["student-0 student-0/1"] and made.students.tend() is None
    made.places["student-0"].go.set()
    assert made.tend_until(lambda: made.listed == ["student-0 student-0/2"]) is None


def test_replacements_are_bounded_and_then_the_trainer_need_not_wait(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(retry={"replace_servers": 2, "backoff_s": 0}, scripts={"student-0": ["up", "fails", "up"]}).begin()
    place = made.places["student-0"]
    place.die()
    made.tend_until(lambda: place.starts == 3 and place.url)
    place.die()
    gone = made.tend_until(lambda: made.students.tend())
    assert "student-0 died: killed by SIGKILL" in str(gone) and place.starts == 3
    assert "retry.replace_servers is used up" in capsys.readouterr().out
    made.students.ensure()  # the next attempt
    assert place.starts == 4 and made.students.tend() is None


def test_a_replacement_that_refuses_its_arguments_is_not_tried_again(run: Any) -> None:
    made = run(scripts={"student-0": ["up", "refused"]}).begin()
    made.places["student-0"].die()
    made.tend_until(lambda: made.places["student-0"].starts == 2)
    assert "did not start: it ended before it was ready" in str(made.tend_until(lambda: made.students.tend()))


def test_a_server_that_hangs_is_ended_and_replaced(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.fleet.UNHEALTHY_S", 0.05)
    made = run(servers={"student": {"count": 2}}).begin()
    made.sick.add("http://127.0.0.1/student-1/1")
    made.tend_until(lambda: made.listed == ["student-0 student-0/1", "student-1 student-1/2"])


def test_a_start_that_fails_fails_ensure_and_the_others_stay(run: Any) -> None:
    made = run(servers={"student": {"count": 2}}, scripts={"student-1": ["fails"]})
    made.students.lease()
    with pytest.raises(ServerStartFailed):
        made.students.ensure()
    made.students.ensure()
    assert [place.starts for place in made.places.values()] == [1, 2]


def test_stopping_ends_a_start_that_is_under_way(run: Any) -> None:
    made = run(scripts={"student-0": ["up", "waits"]}).begin()
    place = made.places["student-0"]
    place.die()
    made.tend_until(lambda: place.starts == 2)
    made.students.stop()
    assert place.url is None and place.leased  # devices are the run's until it ends


# Given by URL


def test_servers_given_by_url_are_checked_listed_and_watched(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUDENT_KEY", "theirs")
    monkeypatch.setattr("flows.students.UNHEALTHY_S", 0.05)
    urls = ["http://127.0.0.1/a", "http://127.0.0.1/b"]
    made = run(servers={"student": {"url": urls, "api_key_env": "STUDENT_KEY"}}).begin()
    assert made.listed == ["student-0 a", "student-1 b"] and not made.places
    assert made.students.environment() == {"VLLM_API_KEY": "theirs"}
    made.sick.add(urls[1])
    shown: list[str] = []
    made.tend_until(lambda: shown.append(capsys.readouterr().out) or "has not answered" in "".join(shown))
    made.sick.clear()
    made.tend_until(lambda: shown.append(capsys.readouterr().out) or "answers again" in "".join(shown))
    assert "".join(shown).count("has not answered") == 1 and made.listed == ["student-0 a", "student-1 b"]


def test_a_later_attempt_begins_without_a_given_server_that_is_away_and_lists_it_when_it_is_back(run: Any) -> None:
    urls = ["http://127.0.0.1/a", "http://127.0.0.1/b"]
    made = run(servers={"student": {"url": urls}})
    made.refused[urls[1]] = ServerUnreachable("connection refused")
    with pytest.raises(ServerUnreachable):
        made.begin()  # at the first start a wrong address is the likelier cause
    made.refused.clear()
    made.students.ensure()
    made.refused[urls[1]] = ServerUnreachable("connection refused")
    made.sick.add(urls[1])
    made.students.ensure()
    assert made.listed == ["student-0 a"] and made.students.config_fields() == {"vllm_server_base_url": urls[0]}
    for _ in range(10):
        made.students.tend()
        time.sleep(0.01)
    assert made.listed == ["student-0 a"]
    made.sick.clear()
    made.tend_until(lambda: made.listed == ["student-0 a", "student-1 b"])
    made.refused[urls[0]] = made.refused[urls[1]]
    with pytest.raises(ServerUnreachable):
        made.students.ensure()


def test_one_that_is_started_beside_given_ones_is_looked_at_for_requests(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlace, "gpus", 1)
    monkeypatch.setattr("flows.busy.EVERY_S", 0.01)
    page = SimpleNamespace(text="vllm:num_requests_running 1.0\n")
    monkeypatch.setattr("flows.busy.request", lambda url, *_, **__: page)
    made = run(servers={"student": {"url": "http://127.0.0.1/a"}}).begin()
    made.ask("add")
    made.tend_until(lambda: made.students.busy_gpu_s()["student"] > 0)


def test_a_given_server_that_lacks_something_is_refused(run: Any) -> None:
    made = run(servers={"student": {"url": "http://127.0.0.1/a"}})
    made.refused["http://127.0.0.1/a"] = ServerCapabilityError("add --enable-scale-out")
    with pytest.raises(ServerCapabilityError):
        made.begin()


# From another shell


def test_servers_are_added_by_count_and_taken_away_again_with_what_they_held(run: Any) -> None:
    made = run().begin()
    assert "student-1, student-2: being started" in made.ask("add", count=2)
    made.tend_until(lambda: len(made.listed) == 3)
    write_serving(made.folder, [Serving(f"student-{i}", f"http://127.0.0.1/student-{i}/1", 4) for i in range(3)])
    assert "student-2: taken away" in made.ask("remove")
    made.tend_until(lambda: len(made.listed) == 2)
    last = made.places["student-2"]
    assert not last.given_up, "the trainer still sends it requests"
    write_serving(made.folder, [Serving(f"student-{i}", f"http://127.0.0.1/student-{i}/1", 5) for i in range(2)])
    made.tend_until(lambda: last.given_up)
    assert not last.leased and last.url is None
    assert "student-0: taken away" in made.ask("remove", "http://127.0.0.1/student-0/1/v1")
    assert made.listed == ["student-1 student-1/1"]
    assert made.students.serving(5) == [f"http://127.0.0.1/student-{i}/1" for i in range(2)] and not made.students.serving(4)


def test_a_server_taken_away_while_it_starts_is_ended(run: Any) -> None:
    made = run(scripts={"student-1": ["waits"]}).begin()
    made.ask("add")
    made.tend_until(lambda: made.places["student-1"].starts == 1)
    made.ask("remove")
    made.tend_until(lambda: made.places["student-1"].given_up)
    assert made.listed == ["student-0 student-0/1"]


def test_a_server_is_added_by_its_address_once_it_was_checked(run: Any) -> None:
    made = run().begin()
    assert "student-1: http://127.0.0.1/x" in made.ask("add", "http://127.0.0.1/x/v1")
    made.tend_until(lambda: made.listed == ["student-1 x", "student-0 student-0/1"])
    with pytest.raises(ServersRefused, match="already"):
        made.ask("add", "http://127.0.0.1/x")
    made.refused["http://127.0.0.1/y"] = ServerUnreachable("its key differs from VLLM_API_KEY")
    with pytest.raises(ServersRefused, match="its key differs"):
        made.ask("add", "http://127.0.0.1/y")
    made.ask("remove", "http://127.0.0.1/x")
    made.tend_until(lambda: made.listed == ["student-0 student-0/1"])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("remove", None, 1), "a run needs a server that is up"),
        (("remove", None, 2), "has started 1 servers itself: 2 cannot"),
        (("remove", "http://127.0.0.1/none", 1), "is none of the run's servers: http://127.0.0.1/student-0/1"),
        (("add", None, 3), "1 GPUs are asked for"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(run: Any, request_: Any, message: str) -> None:
    made = run().begin()
    made.free = 2
    with pytest.raises(ServersRefused, match=message):
        made.ask(*request_)
    assert made.listed == ["student-0 student-0/1"] and made.students.tend() is None
    assert [place.name for place in made.places.values() if place.leased] == ["student-0"]


def test_a_request_that_nobody_waits_for_any_more_is_thrown_away(run: Any) -> None:
    made = run().begin()
    with pytest.raises(ServersRefused, match="did not answer within 0 s"):
        ask(made.folder, "add", None, 1, 0.01)
    box = made.folder / "server_requests"
    assert not list(box.iterdir())
    old = {"id": "a", "action": "add", "url": None, "count": 1, "until": time.time() - 1}
    (box / "a.ask.json").write_text(json.dumps(old))  # of a command that was killed
    made.students.tend()
    assert list(made.places) == ["student-0"] and not list(box.iterdir())


def test_a_server_that_is_still_starting_is_given_a_second_and_one_that_is_ready_its_own_time(
    home: Path, config: Callable[..., GRPORunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to a flow whose servers start: they have nothing to finish, and Prefect kills a flow 30 s after it cancels it."""
    registry = Registry()
    run = registry.create_run("test", "train-grpo", output_dir=str(home))
    graces: list[float | None] = []

    class Server:
        url, process = "http://127.0.0.1:1", SimpleNamespace(pid=1)
        wait_ready = require = lambda self, *args, **options: None

        def stop(self, grace_s: float | None = None) -> None:
            graces.append(grace_s)

        def describe_exit(self) -> str:
            return "exit code 0"

        def capabilities(self) -> SimpleNamespace:
            return SimpleNamespace(model="m", version="1", max_model_len=64, device="cpu")

    monkeypatch.setattr("flows.started_server.start_server", lambda *args, **options: Server())
    with LeaseManager(registry) as leases:
        student = Student(config(), run, registry, leases, "student-0", "key")
        student.start(print)
        student.stop()
        monkeypatch.setattr(Server, "wait_ready", lambda self, *args, **options: student.stop())
        student.start(print)
    assert graces == [None, 1.0]
