"""Servers that come, go and are started anew while a run goes on, as the weight sync sees it: its list, whom it sends what."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.support.fake_control_plane import FakeControlPlane, served_logprobs
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.roster import SERVERS_FILE, Listed, Roster, Serving, plain_url, read_servers, read_serving, write_servers
from trainers.server import ServerFacts
from trainers.weight_sync.sync import ServerSync

GONE = ["connection refused"] * 1000


@pytest.fixture(autouse=True)
def _weights_stay_in_the_tests_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path / "weights"))
    monkeypatch.setattr("trainers.weight_sync.members.GATHER_EVERY_S", 0.01)
    monkeypatch.setattr("trainers.weight_sync.watch.LOOK_EVERY_S", 0.0)


class Servers:
    """Fakes by name, and the sync of a run that begins with some of them."""

    def __init__(self, folder: Path, *first: str, **fields) -> None:
        self.folder, self.planes = folder, {}
        for name in ("a", "b", "c"):
            self.planes[name] = FakeControlPlane(reference=served_logprobs, url=f"http://{name}")
        options = {"output_dir": str(folder), "weight_check_steps": 2, "vllm_server_timeout": 0.3} | fields
        clients = [self.planes[name] for name in first]
        self.sync = ServerSync(grpo_config(**options), ONE_RANK, build_tokenizer(), clients, connect=self._connect)

    def _connect(self, url: str) -> FakeControlPlane:
        return self.planes[url.removeprefix("http://")]

    def list(self, *names: str) -> None:
        write_servers(self.folder, [Listed(f"server-{name}", f"http://{name}") for name in names])

    def wants(self) -> bool:
        """`wanting`, as it is once every look has been made."""
        for _ in range(3):
            if self.sync.wanting():
                return True
            time.sleep(0.05)
        return False

    def news(self) -> list[str] | None:
        servers = self.sync.news()
        return None if servers is None else [server.url.removeprefix("http://") for server in servers]

    def serving(self) -> dict[str, int | None]:
        return {server.url.removeprefix("http://"): server.version for server in read_serving(self.folder)}


def holds(plane: FakeControlPlane, policy) -> bool:
    return all(torch.equal(plane.weights[name], value.detach()) for name, value in policy.model.named_parameters())


def test_a_new_server_gets_the_weights_under_the_same_version_while_the_others_go_on(tmp_path):
    servers = Servers(tmp_path, "a")
    policy = tiny_policy(seed=3)
    servers.sync.push(policy, 5)
    assert not servers.wants() and servers.news() is None and servers.serving() == {"a": 5}
    servers.list("a", "b")
    assert servers.wants()
    calls = len(servers.planes["a"].calls)
    servers.sync.admit(policy, 5)
    new = servers.planes["b"]
    assert holds(new, policy) and new.version == "5" and not new.paused and "probe" in new.calls
    assert set(servers.planes["a"].calls[calls:]) <= {"health", "version"}, "a server was paused for another's sake"
    assert servers.news() == ["a", "b"] and servers.news() is None and servers.serving() == {"a": 5, "b": 5}
    assert not servers.wants()
    servers.sync.push(tiny_policy(seed=4), 6)
    assert new.version == servers.planes["a"].version == "6" and new.calls.count("probe") == 2


def test_a_new_server_takes_part_in_the_next_sync_without_any_wait(tmp_path):
    servers = Servers(tmp_path, "a")
    servers.sync.push(tiny_policy(), 0)
    servers.list("a", "b")
    policy = tiny_policy(seed=1)
    servers.sync.push(policy, 1)
    assert holds(servers.planes["b"], policy) and servers.news() == ["a", "b"]


def test_a_server_that_is_taken_off_the_list_gets_nothing_any_more(tmp_path):
    servers = Servers(tmp_path, "a", "b")
    servers.sync.push(tiny_policy(), 0)
    servers.list("b")
    assert servers.wants()
    servers.sync.admit(tiny_policy(), 0)
    assert servers.news() == ["b"] and servers.serving() == {"b": 0}
    servers.sync.push(tiny_policy(seed=1), 1)
    assert (servers.planes["a"].version, servers.planes["b"].version) == ("0", "1")


def test_a_server_that_was_started_anew_at_its_address_is_found_while_the_trainer_waits(tmp_path):
    servers = Servers(tmp_path, "a")
    policy = tiny_policy(seed=2)
    servers.sync.push(policy, 3)
    restarted = servers.planes["a"]
    restarted.version, restarted.weights = "default", {}
    with pytest.raises(ServerError, match="no student server answers that holds the policy"):
        servers.sync.serving()
    assert servers.wants()
    servers.sync.admit(policy, 3)
    assert holds(restarted, policy) and restarted.version == "3" and not servers.wants()


def test_a_server_that_is_down_is_let_be_until_it_answers(tmp_path):
    servers = Servers(tmp_path, "a", "b")
    policy = tiny_policy()
    servers.sync.push(policy, 0)
    servers.planes["b"].fail = {"health": list(GONE)}
    assert not servers.wants()
    servers.planes["b"].fail = {"update": ["reset"], "health": list(GONE)}
    servers.sync.push(policy, 1)
    assert servers.serving() == {"a": 1, "b": None} and not servers.wants()
    assert servers.sync.serving() == ["http://a"]
    servers.planes["b"].fail = {}
    servers.sync.members.all[1].retry_at = 0.0
    assert servers.wants()
    servers.sync.admit(policy, 1)
    assert servers.serving() == {"a": 1, "b": 1}


def test_when_all_died_in_a_sync_their_replacement_gets_what_they_should_have_got(tmp_path, caplog):
    servers = Servers(tmp_path, "a", vllm_server_timeout=30)
    servers.sync.push(tiny_policy(), 0)
    dead, new = servers.planes["a"], servers.planes["b"]
    dead.fail = {"update": ["reset"], "health": list(GONE)}
    looks = []

    def later(timeout_s=None):
        looks.append(1)
        if len(looks) == 3:
            servers.list("b")
        raise ServerError("connection refused")

    dead.wait_healthy = later
    policy = tiny_policy(seed=7)
    metrics = servers.sync.push(policy, 1)
    assert holds(new, policy) and new.version == "1" and metrics["perf/weight_sync_bytes"] > 0
    assert servers.news() == ["b"] and servers.serving() == {"b": 1}
    assert "http://a leaves the group, nobody is left, a server is waited for" in caplog.text


def test_another_program_that_has_the_only_servers_address_for_a_while_is_waited_out(tmp_path, monkeypatch):
    servers = Servers(tmp_path, "a", vllm_server_timeout=30)
    servers.sync.push(tiny_policy(), 0)
    plane = servers.planes["a"]
    real, looks = plane.facts, []

    def facts():
        looks.append(1)
        if len(looks) < 3:
            raise ServerCapabilityError("http://a wants a key")
        return real()

    # Twice in the sync; then nobody knows whether it is up.
    plane.fail = {"update": ["reset"], "version": ["not as a vLLM server does"] * 2}
    monkeypatch.setattr(plane, "facts", facts)
    policy = tiny_policy(seed=7)
    servers.sync.push(policy, 1)
    assert holds(plane, policy) and servers.serving() == {"a": 1} and len(looks) == 3


def test_why_no_server_can_be_used_is_said_when_the_wait_ends(tmp_path, monkeypatch):
    servers = Servers(tmp_path, "a", vllm_server_timeout=0.3)
    servers.sync.push(tiny_policy(), 0)
    servers.list("b")

    def facts():
        raise ServerCapabilityError("http://b wants a key")

    monkeypatch.setattr(servers.planes["b"], "facts", facts)
    with pytest.raises(ServerError, match=r"waited 0 s for a student server \(http://b\): http://b wants a key"):
        servers.sync.push(tiny_policy(), 1)


def test_without_a_replacement_the_wait_ends(tmp_path):
    servers = Servers(tmp_path, "a")
    servers.sync.push(tiny_policy(), 0)
    servers.planes["a"].fail = {"update": ["reset"], "health": list(GONE)}
    with pytest.raises(ServerError, match=r"waited 0 s for a student server \(http://a\): connection refused"):
        servers.sync.push(tiny_policy(), 1)


def test_weights_that_kill_every_server_end_the_run(tmp_path):
    servers = Servers(tmp_path, "a")
    servers.sync.push(tiny_policy(), 0)
    # It answers again only when it is waited for: another process each time.
    servers.planes["a"].fail = {"update": ["reset"] * 9, "health": ["refused", "refused", ""] * 9}
    with pytest.raises(WeightSyncError, match=r"version 1 killed every student server that it was sent to, 3 times"):
        servers.sync.push(tiny_policy(), 1)


def test_a_run_begins_with_the_servers_that_are_there_and_takes_the_others_in_when_they_answer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trainers.weight_sync.members.LATECOMERS_S", 0.05)
    servers = Servers(tmp_path, "a", "b", vllm_server_timeout=1000)
    late = servers.planes["b"]
    late.fail = {"health": list(GONE)}
    policy = tiny_policy(seed=3)
    servers.sync.push(policy, 0)
    assert caplog.text.count("http://b is not there: the run begins without it") == 1
    assert servers.news() == ["a"] and servers.serving() == {"a": 0, "b": None} and late.version == "default"
    assert read_serving(tmp_path)[1].why == "connection refused" and not servers.wants()
    late.fail = {}
    assert servers.wants()
    servers.sync.admit(policy, 0)
    assert holds(late, policy) and servers.news() == ["a", "b"] and servers.serving() == {"a": 0, "b": 0}


def test_a_run_waits_for_its_first_server_and_a_moment_for_the_others(tmp_path):
    servers = Servers(tmp_path, "a", "b")
    for plane in servers.planes.values():
        plane.fail = {"health": list(GONE)}
    with pytest.raises(ServerError, match=r"waited 0 s for a student server \(http://a, http://b\): connection refused"):
        servers.sync.push(tiny_policy(), 0)
    servers = Servers(tmp_path, "a", "b", vllm_server_timeout=1000)
    servers.planes["b"].fail = {"health": ["connection refused"] * 3}
    servers.sync.push(tiny_policy(), 0)
    assert servers.planes["b"].version == "0" and servers.news() is None


@pytest.mark.parametrize("how", ["dtype", "length", "weights"])
def test_a_server_that_does_not_fit_is_refused_once_and_the_run_goes_on(tmp_path, caplog, how):
    servers = Servers(tmp_path, "a")
    policy = tiny_policy()
    servers.sync.push(policy, 0)
    other = servers.planes["b"]
    if how == "dtype":
        other.dtype = "bfloat16"
    elif how == "length":
        other.facts = lambda: ServerFacts("m", "float32", 256, other.backend)
    else:
        other.shift = 0.5
    servers.list("a", "b")
    servers.sync.admit(policy, 0)
    why = {
        "dtype": "serve it with --dtype float32",
        "length": "--max-model-len 512",
        "weights": "log-probabilities of http://b",
    }
    assert caplog.text.count("server-b (http://b) is not used") == 1 and why[how] in caplog.text
    assert servers.news() is None and servers.serving() == {"a": 0, "b": None}
    assert why[how] in read_serving(tmp_path)[1].why
    assert not servers.wants()
    servers.sync.push(tiny_policy(seed=1), 1)
    assert servers.planes["a"].version == "1" and other.version != "1" and caplog.text.count("is not used") == 1


# The files


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        (" http://Box:8000/v1/ ", "http://box:8000"),
        ("HTTP://LocalHost:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000/v1", "http://127.0.0.1:8000"),
        ("http://localhost/A/v1", "http://127.0.0.1/A"),
        ("http://localhost.lan:8000", "http://localhost.lan:8000"),
        ("https://localhost:8000", "https://localhost:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://User:Word@box", "http://User:Word@box"),
        ("${oc.env:URL}", "${oc.env:URL}"),
    ],
)
def test_a_server_has_one_address_however_it_is_written(written, plain):
    assert plain_url(written) == plain == plain_url(plain)


def test_what_an_earlier_run_left_is_not_taken_for_this_ones_list(tmp_path):
    write_servers(tmp_path, [Listed("old", "http://old")])
    script, flow = Roster(tmp_path), Roster(tmp_path, current=True)
    assert not script.changed and script.read() is None
    assert flow.changed and flow.read() == [Listed("old", "http://old")] and not flow.changed
    write_servers(tmp_path, [Listed("new", "http://new/v1/")])
    assert script.read() == flow.read() == [Listed("new", "http://new")]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"servers": []}',
        '{"servers": [{"name": "a"}]}',
        '{"servers": ["http://a"]}',
        '{"servers": [{"name": "a", "url": "a:8000"}]}',
        '{"servers": [{"name": "a", "url": "http://[::1"}]}',
        '{"servers": [{"name": "a", "url": "http://a"}, {"name": "b", "url": "http://a/"}]}',
        '{"servers": [{"name": "a", "url": "http://127.0.0.1:8000"}, {"name": "b", "url": "http://localhost:8000/v1"}]}',
        '{"servers": [{"name": "a", "url": "http://a"}, {"name": "a", "url": "http://b"}]}',
    ],
)
def test_a_list_that_makes_no_sense_changes_nothing(tmp_path, caplog, content):
    roster = Roster(tmp_path)
    (tmp_path / SERVERS_FILE).write_text(content)
    assert roster.changed and roster.read() is None and not roster.changed
    assert caplog.text.count("the servers stay as they are") == 1
    with pytest.raises(ValueError):
        read_servers(tmp_path)


def test_files_are_what_they_say_they_are(tmp_path):
    assert read_servers(tmp_path) == [] and read_serving(tmp_path) == [] and not Roster(tmp_path, current=True).changed
    write_servers(tmp_path, [Listed("a", "http://a")])
    assert json.loads((tmp_path / "servers.json").read_text()) == {"servers": [{"name": "a", "url": "http://a"}]}
    from trainers.roster import write_serving

    write_serving(tmp_path, [Serving("a", "http://a", None, "died")])
    assert read_serving(tmp_path) == [Serving("a", "http://a", None, "died")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["servers.json", "serving.json"]
