"""Weight sync: order of calls, failure, the probe, several servers; and what is read of a server at the start."""

from __future__ import annotations

import asyncio
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.answering import answering, dripping
from tests.support.fake_control_plane import FakeControlPlane, served_logprobs
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.rollouts.client import GenerateClient
from trainers.server import ServerClient
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.layout import make_layout
from trainers.weight_sync.members import Member
from trainers.weight_sync.probe import probe_tokens
from trainers.weight_sync.shared_storage import PREFIX, SharedStorage, sweep
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.sync import ServerSync
from trainers.weight_sync.update import Seconds

CYCLE = ["pause", "start", "update", "finish", "resume"]


def folder_of(sync: ServerSync) -> Path:
    assert isinstance(sync.way, SharedStorage) and sync.way.files.directory is not None
    return sync.way.files.directory


@pytest.fixture(autouse=True)
def _weights_stay_in_the_tests_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path / "weights"))


def make_sync(tmp_path: Path, **fields) -> tuple[ServerSync, FakeControlPlane]:
    plane = FakeControlPlane(reference=served_logprobs, **fields)
    config = grpo_config(output_dir=str(tmp_path), weight_check_steps=2)
    return ServerSync(config, ONE_RANK, build_tokenizer(), [plane]), plane  # type: ignore[arg-type]


def test_a_sync_pauses_loads_resumes_and_is_checked(tmp_path):
    sync, plane = make_sync(tmp_path)
    policy = tiny_policy(seed=4)
    metrics = sync.push(policy, 7)
    # The resume at the start mends what a trainer that died in mid-sync left behind.
    assert plane.calls == ["health", "resume", "init", *CYCLE, "version", "probe"]
    assert plane.version == "7" and not plane.paused
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(plane.weights[name], parameter.detach()), name
    assert metrics["perf/weight_probe_abs_diff"] < 1e-4
    assert metrics["perf/weight_sync_bytes"] == sum(4 * p.numel() for p in policy.model.parameters())
    folder = folder_of(sync)
    assert folder.is_dir() and not list(folder.iterdir()) and folder.stat().st_mode & 0o77 == 0
    sync.close()
    assert not folder.exists()


def test_the_probe_runs_at_the_first_two_syncs_and_every_weight_check_steps(tmp_path):
    sync, plane = make_sync(tmp_path)
    policy = tiny_policy()
    for version in range(5):
        sync.push(policy, version)
    assert plane.calls.count("probe") == 4 and plane.calls.count("version") == 5


@pytest.mark.parametrize("call", ["pause", "start", "update", "finish"])
def test_a_failed_call_is_tried_once_more_on_a_resumed_server(tmp_path, call):
    sync, plane = make_sync(tmp_path, fail={call: ["lost"]})
    sync.push(tiny_policy(), 1)
    failed = CYCLE[: CYCLE.index(call) + 1]
    # Before the second try it is asked whether it lives, and told everything again: it may be another process.
    assert plane.calls[3:] == [*failed, "resume", "health", "version", "init", *CYCLE, "version", "probe"]
    assert plane.version == "1" and not plane.paused


@pytest.mark.parametrize("call", ["pause", "start", "update", "finish"])
def test_a_second_failure_fails_the_step_with_the_servers_words_and_leaves_nothing_paused(tmp_path, call):
    sync, plane = make_sync(tmp_path, fail={call: ["first", "disk on fire"]})
    with pytest.raises(WeightSyncError, match="twice: disk on fire"):
        sync.push(tiny_policy(), 1)
    assert plane.version == "default" and not plane.paused
    # It is up, so the fault is not one that waiting for a replacement could mend.
    assert plane.calls[-3:] == ["resume", "health", "version"]
    assert not list(folder_of(sync).iterdir())


def test_an_interrupt_in_mid_sync_resumes_the_server(tmp_path):
    sync, plane = make_sync(tmp_path)

    def interrupt(update_info):
        raise KeyboardInterrupt

    plane.update = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        sync.push(tiny_policy(), 1)
    assert not plane.paused and not list(folder_of(sync).iterdir())


def test_a_lost_resume_is_sent_again(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.weight_sync.update.time.sleep", lambda seconds: None)
    sync, plane = make_sync(tmp_path, fail={"resume": ["", "lost", "lost"]})
    sync.push(tiny_policy(), 1)
    assert not plane.paused and plane.calls.count("resume") == 4 and plane.calls.count("update") == 1


@pytest.mark.parametrize(("shift", "fails"), [(0.05, True), (1e-4, False), (float("nan"), True)])
def test_a_server_with_other_weights_is_found_by_the_probe(tmp_path, shift, fails):
    sync, _ = make_sync(tmp_path, shift=shift)
    if fails:
        with pytest.raises(WeightSyncError, match="log-probabilities of http://fake differ"):
            sync.push(tiny_policy(), 1)
    else:
        assert sync.push(tiny_policy(), 1)["perf/weight_probe_abs_diff"] == pytest.approx(1e-4, rel=0.1)


def test_a_version_that_did_not_arrive_is_an_error(tmp_path):
    sync, plane = make_sync(tmp_path)
    plane.finish_update = lambda version: None  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="says it serves version 'default' after a sync to 3"):
        sync.push(tiny_policy(), 3)


def test_a_server_without_the_engine_is_refused_with_the_flag(tmp_path):
    sync, _ = make_sync(tmp_path, backend="nccl")
    with pytest.raises(ServerCapabilityError, match=r"--weight-transfer-config '\{\"backend\": \"loopwright\"\}'"):
        sync.push(tiny_policy(), 0)


def test_a_server_of_another_dtype_gets_its_own_and_is_warned_about_once(tmp_path, caplog):
    sync, plane = make_sync(tmp_path, dtype="bfloat16")
    plane.reference = lambda weights, tokens: served_logprobs({n: w.float() for n, w in weights.items()}, tokens)
    for version in (0, 1):
        sync.push(tiny_policy(), version)
    assert {weight.dtype for weight in plane.weights.values()} == {torch.bfloat16}
    assert caplog.text.count("serve with --dtype float32") == 1


def several(tmp_path: Path, *planes: FakeControlPlane) -> ServerSync:
    config = grpo_config(output_dir=str(tmp_path), weight_check_steps=2)
    return ServerSync(config, ONE_RANK, build_tokenizer(), planes)  # type: ignore[arg-type]


def test_every_server_gets_the_same_file_and_is_checked(tmp_path):
    planes = [FakeControlPlane(reference=served_logprobs, url=f"http://s{i}", shift=1e-4 * i) for i in range(3)]
    policy = tiny_policy(seed=4)
    metrics = several(tmp_path, *planes).push(policy, 7)
    for plane in planes:
        assert plane.calls == ["health", "resume", "init", *CYCLE, "version", "probe"]
        assert plane.version == "7" and not plane.paused
        assert all(torch.equal(plane.weights[name], value.detach()) for name, value in policy.model.named_parameters())
    assert metrics["perf/weight_probe_abs_diff"] == pytest.approx(2e-4, rel=0.1)


def test_one_of_several_servers_that_fails_twice_leaves_and_comes_back_with_current_weights(tmp_path, caplog):
    good, bad = (FakeControlPlane(reference=served_logprobs, url=f"http://{name}") for name in ("good", "bad"))
    bad.fail = {"update": ["", "first", "disk on fire"], "health": ["", "", "still booting"]}
    sync = several(tmp_path, good, bad)
    sync.push(tiny_policy(), 1)
    sync.push(tiny_policy(seed=1), 2)
    assert "http://bad leaves the group, the others go on: disk on fire" in caplog.text
    assert (good.version, bad.version) == ("2", "1") and not good.paused and not bad.paused
    sync.push(tiny_policy(seed=2), 3)  # it does not answer yet
    assert (good.version, bad.version) == ("3", "1")
    policy = tiny_policy(seed=3)
    sync.push(policy, 4)
    assert (good.version, bad.version) == ("4", "4")
    assert all(torch.equal(bad.weights[name], value.detach()) for name, value in policy.model.named_parameters())
    assert not list(folder_of(sync).iterdir())


def test_a_server_that_dies_in_mid_sync_is_left_without_a_second_try(tmp_path):
    good, bad = (FakeControlPlane(reference=served_logprobs, url=f"http://{name}") for name in ("good", "bad"))
    bad.fail = {"update": ["", "connection reset"], "health": ["", "connection refused"]}
    sync = several(tmp_path, good, bad)
    sync.push(tiny_policy(), 1)
    sync.push(tiny_policy(), 2)
    assert good.version == "2" and bad.calls.count("update") == 2


def test_a_server_that_answers_with_other_weights_fails_the_sync_although_others_remain(tmp_path):
    good, bad = (FakeControlPlane(reference=served_logprobs, url=f"http://{name}") for name in ("good", "bad"))
    bad.shift = 0.05
    with pytest.raises(WeightSyncError, match="log-probabilities of http://bad differ"):
        several(tmp_path, good, bad).push(tiny_policy(), 1)


def test_blocks_that_are_never_trained_are_sent_once_and_again_to_a_newcomer(tmp_path):
    sync, plane = make_sync(tmp_path)
    policy = tiny_policy()
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.1."))
    everything = sync.push(policy, 0)["perf/weight_sync_bytes"]
    trained = sum(4 * p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert sync.push(policy, 1)["perf/weight_sync_bytes"] == trained < everything
    plane.fail = {"update": ["died"]}
    plane.version = "default"  # another process answers at its address
    with pytest.raises(WeightSyncError, match="died"):
        sync.push(policy, 2)
    plane.fail = {}
    sync.members.inside[0].facts = None  # as if it had left
    assert sync.push(policy, 3)["perf/weight_sync_bytes"] == everything


class Receiver(FakeControlPlane):
    def update(self, update_info: dict) -> None:
        self._call("update")


def test_a_server_that_refuses_the_layout_of_a_broadcast_fails_alone():
    policy = tiny_policy()
    staging = Staging(torch.device("cpu"))
    staging.fill(policy, make_layout(policy.model, torch.float32, everything=True), torch.float32, keep=True)
    planes = [Receiver(url="http://127.0.0.1:1"), Receiver(url="http://127.0.0.1:2", fail={"layout": ["it does not fit"]})]
    good, bad = [Member(plane, facts=plane.facts()) for plane in planes]
    results = Broadcast(torch.device("cpu"), "gloo", 20.0).send([good, bad], staging, 1)
    assert isinstance(results[good], Seconds) and planes[0].version == "1"
    assert isinstance(results[bad], ServerError) and "it does not fit" in str(results[bad])


def test_a_part_of_a_block_is_never_sent_alone(tmp_path):
    policy = tiny_policy()
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(name.endswith("layers.0.self_attn.q_proj.weight"))
    layout = make_layout(policy.model, torch.bfloat16, everything=False)
    names = [name for name, _ in policy.model.named_parameters() if name.startswith("model.layers.0.")]
    assert [entry.name for entry in layout.entries] == names and layout.partial


def test_buckets_hold_every_tensor_once_in_the_models_order():
    policy = tiny_policy(seed=3)
    for bucket_bytes in (1 << 12, 1 << 15, 1 << 28):
        layout = make_layout(policy.model, torch.bfloat16, everything=True, bucket_bytes=bucket_bytes)
        staging = Staging(torch.device("cpu"))
        staging.fill(policy, layout, torch.bfloat16, keep=True)
        views = layout.views(staging.buckets)
        assert list(views) == [name for name, _ in policy.model.named_parameters()]
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(views[name], parameter.detach().bfloat16()), name
        spans = sorted((e.bucket, e.offset, e.offset + e.nbytes) for e in layout.entries)
        assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(spans))
    assert len(layout.buckets) == 1


def test_servers_of_different_types_are_refused(tmp_path):
    planes = [FakeControlPlane(dtype=dtype, url=f"http://{dtype}") for dtype in ("float32", "bfloat16")]
    with pytest.raises(ServerCapabilityError, match=r"http://bfloat16: bfloat16.*serve all with --dtype float32"):
        several(tmp_path, *planes).push(tiny_policy(), 0)


def test_the_probe_is_ordinary_text_where_the_tokenizer_knows_it():
    tokens = probe_tokens(build_tokenizer(), 64)
    assert len(tokens) == 48 and len(set(tokens.tolist())) > 8
    spread = probe_tokens(None, 1000)
    assert len(spread) == 48 and spread.max() < 1000


def test_folders_of_killed_trainers_are_swept_and_those_of_live_ones_stay(tmp_path):
    sync, _ = make_sync(tmp_path)
    sync.push(tiny_policy(), 0)
    base = folder_of(sync).parent
    orphan, fresh = base / (PREFIX + "orphan"), base / (PREFIX + "fresh")
    for folder in (orphan, fresh):
        folder.mkdir()
        (folder / "policy-3.safetensors").write_bytes(b"x")
    hour_ago = time.time() - 3600
    for folder in (orphan, folder_of(sync)):
        os.utime(folder, (hour_ago, hour_ago))
    sweep(base)
    assert not orphan.exists() and fresh.exists() and folder_of(sync).exists()
    sync.close()
    assert [path.name for path in base.iterdir()] == [PREFIX + "fresh"]


def test_an_unreachable_server_says_so():
    client = ServerClient("http://127.0.0.1:9", 1.0, key="k")
    with pytest.raises(ServerError, match="ConnectError"):
        client.weight_version()
    with pytest.raises(ServerError, match=r"no healthy server at http://127\.0\.0\.1:9"):
        client.wait_healthy(0.01)


@pytest.mark.parametrize("begins", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(monkeypatch, begins):
    monkeypatch.setattr("trainers.server.CONNECT_TIMEOUT_S", 1.0)
    with dripping(begins) as url, pytest.raises(ServerError, match="no whole answer within 2 s"):
        ServerClient(url, 1.0, key="k").weight_version()


@pytest.mark.parametrize("key", ["secret\n", "sécret"])
def test_a_key_is_sent_as_the_server_expects_it(monkeypatch, key):
    """A mounted secret ends in a newline; in a header that is refused, with the key in the error."""
    monkeypatch.setenv("VLLM_API_KEY", key)
    expected = f"Bearer {key.strip()}".encode().decode("latin-1")
    answer = b'{"weight_version": "3", "data": [{"id": "policy", "max_model_len": 64}]}'
    with answering(200, answer, key=expected) as url:
        assert ServerClient(url, 5.0).weight_version() == "3"
        assert asyncio.run(open_and_close(GenerateClient(url), "/weight_info")) == 200


async def open_and_close(client: GenerateClient, path: str) -> int:
    await client.open(5.0)
    status, _ = await client.request("GET", path)
    await client.close()
    return status


@pytest.mark.parametrize("status", [500, 503])
def test_an_address_with_404_in_it_is_not_taken_for_an_answer(status):
    """Ports of servers lie between 20000 and 30000, among them 24041."""
    with answering(status) as url:
        client = ServerClient(f"{url}/24041", 5.0, key="k")
        with pytest.raises(ServerError) as refused:
            client.facts()
        assert not isinstance(refused.value, ServerCapabilityError), "it would never be asked again"
        client._told = "7"
        with pytest.raises(ServerError, match=f"answered {status}"):
            client.weight_version()


def test_development_endpoints_that_are_off_are_said_with_what_turns_them_on():
    with answering(404) as url, pytest.raises(ServerCapabilityError, match="VLLM_SERVER_DEV_MODE=1"):
        ServerClient(url, 5.0, key="k").facts()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"vllm_config": {"model_config": null}}', b'"text"'])
def test_something_else_that_answers_is_no_vllm_server(body):
    with answering(200, body) as url, pytest.raises(ServerCapabilityError, match="is no vLLM server"):
        ServerClient(url, 5.0, key="k").facts()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"workers": null, "weight_version": null}'])
def test_another_program_at_the_address_of_a_server_that_ended_is_a_server_that_fails(body):
    tokens = np.arange(4, dtype=np.int32)
    with answering(200, body) as url:
        client = ServerClient(url, 5.0, key="k")
        calls = [client.world_size, client.is_paused, client.loaded_adapters, lambda: client.sync({}, 1)]
        calls += [lambda: client.sampled(tokens, 2, 8), lambda: client.prompt_logprobs(tokens, 1)]
        for call in calls:
            with pytest.raises(ServerError, match="does not answer as a vLLM server does"):
                call()
        if b"weight_version" not in body:
            with pytest.raises(ServerError, match="does not answer as a vLLM server does"):
                client.weight_version()


def test_a_front_end_that_does_not_know_its_engine_leaves_it_to_the_workers():
    model = {"model": "/m", "dtype": "torch.bfloat16", "max_model_len": 8192}
    config = {"model_config": model, "weight_transfer_config": {"backend": "loopwright"}}
    page = json.dumps({"vllm_config": {}, "workers": [{"version": "3", "config": config}]}).encode()
    with answering(200, page) as url:
        facts = ServerClient(url, 5.0, key="k").facts()
    assert (facts.model, facts.dtype, facts.max_model_len, facts.weight_backend) == ("/m", "bfloat16", 8192, "loopwright")
    assert facts.one_call and facts.adapters is None
