"""Which way `weight_sync=auto` takes, and what is refused with what to do instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fake_adapters import ABLE
from tests.support.fake_control_plane import FakeControlPlane
from tests.support.policies import grpo_config, tiny_policy
from trainers.errors import ServerCapabilityError, ServerError
from trainers.server import BACKEND, ServerFacts
from trainers.weight_sync import choose as module
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.changes import Changes
from trainers.weight_sync.choose import check_member, choose, machine
from trainers.weight_sync.ipc import Ipc, _parts
from trainers.weight_sync.layout import make_layout
from trainers.weight_sync.lora import Adapters
from trainers.weight_sync.members import Member
from trainers.weight_sync.shared_storage import SharedStorage
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.stock import Servers, Stock
from trainers.weight_sync.update import Seconds

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SILENT = Member(FakeControlPlane(), facts=ServerFacts("m", "bfloat16", 512, BACKEND))  # of its workers it says nothing


def member(url: str = "http://127.0.0.1:8000", backend: str = BACKEND, **worker: Any) -> Member:
    workers = [{"gpu_uuid": None, "machine": machine(), **worker}]
    return Member(FakeControlPlane(url=url), facts=ServerFacts("m", "bfloat16", 512, backend, tuple(workers)))


def chosen(members: list[Member], device: torch.device, monkeypatch, uuids: tuple = ("GPU-a",), **fields: Any):
    monkeypatch.setattr(module, "gpu_uuid", lambda device: uuids[0] if device.type == "cuda" else None)
    return choose(grpo_config(**fields), members, device, len(uuids), uuids)


def test_auto_goes_by_where_servers_and_trainer_run(monkeypatch):
    def auto(*members: Member, device: torch.device = GPU, uuids: tuple = ("GPU-a",)):
        return chosen(list(members), device, monkeypatch, uuids)

    assert isinstance(auto(member(gpu_uuid="GPU-a")), Ipc)
    assert isinstance(auto(member(gpu_uuid="GPU-b"), uuids=("GPU-a", "GPU-b")), Ipc)
    away = auto(member(gpu_uuid="GPU-b"), member(gpu_uuid="GPU-c"))
    assert isinstance(away, Broadcast) and away.backend == "nccl"
    assert isinstance(auto(member(gpu_uuid="GPU-a"), member(gpu_uuid="GPU-b")), SharedStorage)
    # Memory of a GPU is shared on loopback only, and NCCL refuses two ranks on one GPU.
    assert isinstance(auto(member("http://node2:8000", gpu_uuid="GPU-a")), SharedStorage)
    assert isinstance(auto(member(), device=CPU), SharedStorage)
    assert isinstance(auto(member(), device=GPU), SharedStorage)
    remote = auto(member("http://node2:8000", machine="node2 x"), device=CPU)
    assert isinstance(remote, Broadcast) and remote.backend == "gloo"


def test_changes_go_by_file_where_both_see_it_else_over_the_network(monkeypatch):
    here = chosen([member()], CPU, monkeypatch, weight_sync="sparse")
    assert isinstance(here, Changes) and here.broadcast is None
    there = chosen([member("http://node2:8000", machine="node2 x")], CPU, monkeypatch, weight_sync="sparse")
    assert isinstance(there, Changes) and there.broadcast is not None


@pytest.mark.parametrize(
    ("members", "fields", "message"),
    [
        ([member(gpu_uuid="GPU-b")], {"weight_sync": "ipc"}, "set weight_sync=nccl or shared_storage"),
        ([member("http://node2:8000", gpu_uuid="GPU-a")], {"weight_sync": "ipc"}, "on loopback only"),
        ([member(backend="nccl")], {"weight_sync": "shared_storage"}, r"needs the flag --weight-transfer-config"),
        ([member(), member(backend="nccl")], {}, r"needs the flag --weight-transfer-config"),
        ([member("http://node2:8000", backend="ipc", gpu_uuid="GPU-a")], {}, "set its backend to nccl"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(monkeypatch, members, fields, message):
    with pytest.raises(ServerCapabilityError, match=message):
        chosen(members, GPU, monkeypatch, **fields)


def test_servers_with_vllms_own_engine_are_sent_to_through_it_from_a_gpu(monkeypatch):
    way = chosen([member(backend="nccl")], GPU, monkeypatch)
    assert isinstance(way, Stock) and way.backend == "nccl"
    with pytest.raises(ServerCapabilityError, match="needs the flag"):
        chosen([member(backend="nccl")], CPU, monkeypatch)


def test_a_broadcast_needs_to_know_the_workers(monkeypatch):
    with pytest.raises(ServerCapabilityError, match="--worker-extension-cls"):
        chosen([SILENT], CPU, monkeypatch, weight_sync="nccl")


@pytest.mark.parametrize(
    ("way", "late", "message"),
    [
        (Ipc(CPU, 1), member("http://node2:8000", gpu_uuid="GPU-a"), "on loopback only, http://node2:8000 is not"),
        (Ipc(CPU, 1), member(gpu_uuid="GPU-b"), "runs on .*GPU-b"),
        (Stock("ipc", GPU, 1), member("http://node2:8000", backend="ipc"), "loopback only"),
        (Broadcast(CPU, "gloo", 1.0), SILENT, "--worker-extension-cls"),
        (Changes("x", Broadcast(CPU, "gloo", 1.0)), SILENT, "--worker-extension-cls"),
    ],
)
def test_a_server_that_comes_later_is_held_to_the_way_that_was_chosen(way, late, message):
    """Handles to the trainer's memory go to loopback only, whoever names a server; and a broadcast waits for who is counted."""
    with pytest.raises(ServerCapabilityError, match=message):
        check_member(grpo_config(), way, late, ["GPU-a"])
    check_member(grpo_config(), way, member(gpu_uuid="GPU-a"), ["GPU-a"])


def test_rounds_through_a_window_bring_every_bucket_once_and_fit():
    layout = make_layout(tiny_policy().model, torch.float32, everything=True, bucket_bytes=1 << 14)
    room = 2 * max(layout.buckets)
    parts = _parts(layout, room)
    assert [index for part, _ in parts for index in part] == list(range(len(layout.buckets)))
    assert all(part and sum(layout.buckets[index] for index in part) <= room for part, _ in parts)
    assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 1


@pytest.mark.parametrize(
    ("peft", "able", "way"), [({"r": 4}, True, Adapters), ({"r": 4}, False, SharedStorage), (None, False, SharedStorage)]
)
def test_adapters_go_alone_to_servers_that_take_them(tmp_path, monkeypatch, peft, able, way):
    server = member()
    assert server.facts is not None
    server.facts = replace(server.facts, adapters=ABLE if able else None)
    assert isinstance(chosen([server], CPU, monkeypatch, peft=peft, output_dir=str(tmp_path)), way)


def test_a_server_that_vllm_s_own_engine_left_paused_did_not_take_the_version(monkeypatch):
    monkeypatch.setattr("trainers.weight_sync.update.time.sleep", lambda seconds: None)
    monkeypatch.setattr(Stock, "_connect", lambda stock, members: setattr(stock, "servers", Servers(members, {})))
    monkeypatch.setattr(Stock, "_transfer", lambda stock: None)
    policy, staging = tiny_policy(), Staging(CPU)
    staging.fill(policy, make_layout(policy.model, torch.float32, everything=True), torch.float32, keep=True)
    plane = FakeControlPlane(fail={"resume": ["no answer"] * 3})
    server = Member(plane, facts=ServerFacts("m", "float32", 512, "nccl"))
    stock = Stock("nccl", CPU, 1)
    result = stock.send([server], staging, 3)[server]
    assert plane.paused and isinstance(result, ServerError) and "no answer" in str(result)
    assert isinstance(stock.send([server], staging, 3)[server], Seconds) and not plane.paused
