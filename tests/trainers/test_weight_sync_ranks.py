"""Several ranks, and ranks that do not come: second tries of a weight sync, and deadlines of the groups that send it."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from infra.vllm import PLUGIN
from tests.support.fake_control_plane import FakeControlPlane, served_logprobs
from tests.support.policies import grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.distributed import Ranks
from trainers.errors import ServerError
from trainers.server import ServerFacts
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.layout import make_layout
from trainers.weight_sync.members import Member
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.sync import ServerSync
from trainers.weight_sync.update import Seconds

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm import carriers


class TwoRanks(Ranks):
    """Rank 0 of two, the other of which always agrees."""

    def rank_zero(self, fn):
        return fn()


class EveryRank:
    """A way that takes handles of every rank; `fails`: how often each server fails."""

    name, on_host, every_rank, bytes_sent, served_as = "every rank", True, True, 1, None

    def __init__(self, fails: dict[str, int]) -> None:
        self.fails, self.sent = fails, []

    def send(self, members, staging, version):
        results = {}
        for member in members:
            url = member.client.url
            self.sent.append((url, member.channel))
            if self.fails.get(url, 0):
                self.fails[url] -= 1
                results[member] = ServerError("the handle was spent")
            else:
                member.client.version, member.channel = str(version), "connected"
                results[member] = Seconds(0.0, 0.0)
        return results

    def close(self) -> None: ...


@pytest.mark.parametrize(("times", "inside"), [(1, ["http://a", "http://b"]), (2, ["http://a"])])
def test_a_second_try_that_takes_something_of_every_rank_is_a_round_of_its_own(tmp_path, monkeypatch, times, inside):
    """What the ranks hand out is spent by the first: a try that only rank 0 made would lack the others' part."""
    planes = [FakeControlPlane(reference=served_logprobs, url=f"http://{name}") for name in "ab"]
    way = EveryRank({"http://b": times})
    config = grpo_config(output_dir=str(tmp_path), weight_check_steps=0, vllm_server_timeout=5)
    ranks = TwoRanks(0, 2, 0, torch.device("cpu"), None, None)
    sync = ServerSync(config, ranks, build_tokenizer(), planes, way)
    gathered = []
    monkeypatch.setattr(sync, "_gathered", lambda mine: gathered.append(mine) or [mine, mine])
    sync.push(tiny_policy(), 4)
    assert [member.client.url for member in sync.members.inside] == inside and planes[0].version == "4"
    # Both rounds asked every rank, and in the second the failed one was new.
    assert [url for url, _ in way.sent] == ["http://a", "http://b"] * 2 and way.sent[-1] == ("http://b", None)
    assert gathered.count([]) == 2


class Stuck(FakeControlPlane):
    """Takes the transport, and its worker never joins the group."""

    def __init__(self, release: threading.Event, **fields) -> None:
        super().__init__(**fields)
        self.release = release

    def facts(self) -> ServerFacts:
        return replace(super().facts(), workers=({}, {}))

    def init_weight_transfer(self, init_info: dict) -> None:
        self.release.wait(60)


def test_ranks_that_do_not_join_a_group_are_named(monkeypatch):
    monkeypatch.setattr("trainers.weight_sync.broadcast.CONNECT_TIMEOUT_S", -4.5)  # 5 s are added
    policy, release = tiny_policy(), threading.Event()
    staging = Staging(torch.device("cpu"))
    staging.fill(policy, make_layout(policy.model, torch.float32, everything=True), torch.float32, keep=True)
    plane = Stuck(release, url="http://127.0.0.1:1")
    member = Member(plane, facts=plane.facts())
    monkeypatch.setattr("trainers.weight_sync.broadcast.TCPStore", lambda *args, **options: SimpleNamespace(port=1))
    monkeypatch.setattr("trainers.weight_sync.broadcast.make_group", lambda *args: release.wait(60))
    results = Broadcast(torch.device("cpu"), "gloo", 20.0).send([member], staging, 1)
    release.set()
    assert "rank 1 (http://127.0.0.1:1), rank 2 (http://127.0.0.1:1) did not come within 0 s" in str(results[member])


def test_a_worker_does_not_wait_for_a_group_for_ever(monkeypatch):
    monkeypatch.setattr(carriers, "STORE_TIMEOUT_S", -4.5)
    release = threading.Event()
    monkeypatch.setattr(carriers.dist, "TCPStore", lambda *args, **options: release.wait(60))
    with pytest.raises(TimeoutError, match="rank 2 of 3 waited for the others of the nccl weight group: not within 0 s"):
        carriers.BroadcastCarrier("nccl", "127.0.0.1", 1, "token", 2, 3, torch.device("cpu"))
    release.set()
