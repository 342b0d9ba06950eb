"""Sync of the adapter alone: versions side by side, which leave one after the other; what servers must be able to do."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.answering import answering
from tests.support.fake_adapters import ABLE, FakeAdapterServer
from tests.support.fake_control_plane import FakeControlPlane, served_logprobs
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers import lora
from trainers.adapters import adapter_name, is_later, version_of
from trainers.errors import ServerCapabilityError, WeightSyncError
from trainers.model import Policy, gathered_parameters
from trainers.roster import Listed, read_serving, write_servers
from trainers.server import ServerClient
from trainers.weight_sync.lora import FOLDER
from trainers.weight_sync.sync import ServerSync

RUN = {"peft": {"r": 4}, "weight_check_steps": 2, "max_staleness": 1}


def make_sync(tmp_path: Path, *servers: FakeAdapterServer | FakeControlPlane, **fields) -> tuple[ServerSync, Policy]:
    config = grpo_config(output_dir=str(tmp_path), **{**RUN, **fields})
    return ServerSync(config, ONE_RANK, build_tokenizer(), servers), tiny_policy(config)


def move(policy: Policy, seed: int) -> None:
    """As an optimizer step would, in every matrix of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in lora.adapter_parameters(policy.model).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def versions(names) -> list[int]:
    return [version for name in names if (version := version_of(name)) is not None]


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / FOLDER).iterdir())


def test_names_tell_version_and_run():
    one, two = adapter_name(9, "aaaaaa"), adapter_name(10, "aaaaaa")
    assert (version_of(one), version_of("policy-v9"), version_of("policy")) == (9, None, None)
    assert is_later(two, one) and not is_later(one, two) and not is_later(adapter_name(10, "bbbbbb"), one)


def test_each_version_is_an_adapter_of_its_own_and_the_base_is_never_touched(tmp_path):
    server = FakeAdapterServer()
    sync, policy = make_sync(tmp_path, server)
    for version in range(2):
        move(policy, version)
        metrics = sync.push(policy, version)
    assert versions(server.held) == [0, 1] and sync.served_as == server.adapter == list(server.held)[-1]
    assert metrics["perf/weight_probe_abs_diff"] < 1e-4 and metrics["perf/weight_sync_pause_s"] == 0
    folder = tmp_path / FOLDER / "policy-v1"
    assert metrics["perf/weight_sync_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert not {"pause", "init", "layout", "start", "update", "finish"} & set(server.calls), server.calls
    one, two = (
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight for model in server.held.values()
    )
    assert not torch.equal(one, two), "the first version serves what it served"


def test_an_adapter_is_sent_in_the_servers_type(tmp_path):
    server = FakeAdapterServer(dtype="bfloat16")
    sync, policy = make_sync(tmp_path, server, weight_check_steps=0)
    move(policy, 0)
    sync.push(policy, 0)
    sent = load_file(tmp_path / FOLDER / "policy-v0" / "adapter_model.safetensors")
    mine = lora.adapter_parameters(policy.model)
    assert len(sent) == len(mine) and all(tensor.dtype == torch.bfloat16 for tensor in sent.values())
    for name, parameter in mine.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(sent[lora.PREFIX + name.replace(".default", "")], parameter.detach().bfloat16()), name


def test_a_version_stays_for_its_window_and_one_sync_more_and_then_goes_with_its_folder(tmp_path):
    server = FakeAdapterServer()
    sync, policy = make_sync(tmp_path, server)
    for version in range(6):
        sync.push(policy, version)
        kept = list(range(max(0, version - 2), version + 1))  # max_staleness 1: it, the one before, and the one that just left
        assert versions(server.held) == kept and folders(tmp_path) == [f"policy-v{v}" for v in kept]
    serving = sync.config.adapter_serving
    assert serving is not None and server.most_held == serving.max_loras == 3
    sync.close()
    assert folders(tmp_path) == ["policy-v5"], "the last may still be asked for, as by an evaluation"


def test_what_a_dead_trainer_left_goes_and_other_adapters_stay(tmp_path):
    server = FakeAdapterServer(held={"policy-v7-abcdef": None, "somebody-elses": None})
    (tmp_path / FOLDER / "policy-v7").mkdir(parents=True)
    sync, policy = make_sync(tmp_path, server)
    sync.push(policy, 7)
    assert "policy-v7-abcdef" not in server.held and "somebody-elses" in server.held and versions(server.held) == [7]
    assert sync.served_as != "policy-v7-abcdef", "a name is never used for other weights: servers keep prefixes by name"


def test_a_server_started_anew_gets_every_version_of_the_window(tmp_path):
    servers = FakeAdapterServer(url="http://one"), FakeAdapterServer(url="http://two")
    sync, policy = make_sync(tmp_path, *servers)
    for version in range(3):
        sync.push(policy, version)
    servers[1].held.clear()
    sync.push(policy, 3)
    assert versions(servers[0].held) == versions(servers[1].held) == [1, 2, 3]


def test_a_failed_load_is_tried_once_more_then_the_step_fails_with_the_servers_words(tmp_path):
    server = FakeAdapterServer(fail={"load policy-v0": ["busy"]})
    sync, policy = make_sync(tmp_path, server)
    sync.push(policy, 0)
    assert versions(server.held) == [0]
    server.fail["load policy-v1"] = ["first", "no memory for it"]
    with pytest.raises(WeightSyncError, match="twice: no memory for it"):
        sync.push(policy, 1)


def test_a_server_that_fails_leaves_the_others_go_on(tmp_path):
    servers = FakeAdapterServer(url="http://one"), FakeAdapterServer(url="http://two", fail={"load policy-v1": ["x", "y"]})
    sync, policy = make_sync(tmp_path, *servers)
    for version in range(3):
        sync.push(policy, version)
    assert versions(servers[0].held) == [0, 1, 2]
    assert versions(servers[1].held) == [0, 1, 2], "back with all it missed"


def test_another_base_model_is_found_by_what_it_samples(tmp_path):
    sync, policy = make_sync(tmp_path, FakeAdapterServer(base_seed=3))
    with pytest.raises(WeightSyncError, match=r"the adapter in http://fake gives log-probabilities that differ"):
        sync.push(policy, 0)


def joined_by(tmp_path: Path, late: FakeAdapterServer) -> tuple[ServerSync, FakeAdapterServer]:
    """A run on one server, at version 1, to which another came."""
    first = FakeAdapterServer(url="http://first")
    config = grpo_config(output_dir=str(tmp_path), **RUN)
    sync = ServerSync(config, ONE_RANK, build_tokenizer(), [first], connect={late.url: late}.__getitem__)
    policy = tiny_policy(config)
    for version in range(2):
        move(policy, version)
        sync.push(policy, version)
    write_servers(tmp_path, [Listed("first", first.url), Listed("late", late.url)])
    sync.admit(policy, 1)
    return sync, first


def test_a_server_that_comes_later_has_the_window_before_rollouts_know_of_it(tmp_path):
    late = FakeAdapterServer(url="http://late")
    sync, first = joined_by(tmp_path, late)
    assert versions(late.held) == versions(first.held) == [0, 1] and "sample" in late.calls, "it was compared too"
    assert [server.name for server in sync.news() or ()] == ["first", "late"]
    assert [(server.name, server.version) for server in read_serving(tmp_path)] == [("first", 1), ("late", 1)]


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (FakeAdapterServer(url="http://late", base_seed=3), "serves another base model or dtype"),
        (FakeAdapterServer(url="http://late", adapters=replace(ABLE, max_lora_rank=1)), "--max-lora-rank 8"),
        (FakeAdapterServer(url="http://late", adapters=None), "without --enable-lora"),
    ],
)
def test_a_server_that_comes_later_and_does_not_fit_is_refused_and_the_run_goes_on(tmp_path, late, why):
    sync, first = joined_by(tmp_path, late)
    assert sync.news() is None, "rollouts never hear of it"
    _, other = read_serving(tmp_path)
    assert other.version is None and why in other.why
    policy = tiny_policy(sync.config)
    sync.push(policy, 2)
    assert versions(first.held) == [0, 1, 2] and sync.news() is None


def test_a_folder_the_server_cannot_read_is_said_with_what_to_do(tmp_path):
    server = FakeAdapterServer()
    server.load_adapter = lambda name, folder: FakeAdapterServer.load_adapter(server, name, "/elsewhere" + folder)  # type: ignore[method-assign]
    sync, policy = make_sync(tmp_path, server)
    with pytest.raises(
        ServerCapabilityError, match=r"cannot read .*policy-v0: set output_dir to a folder that trainer and server both see"
    ):
        sync.push(policy, 0)


# What servers must be able to do -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_lora_rank": 1}, "--max-lora-rank 8"),
        ({"max_loras": 2}, r"--max-loras 3 \(max_staleness \+ 2\)"),
        ({"at_runtime": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"api_processes": 4}, "--api-server-count 1"),
        ({"data_parallel": 2}, "2 data-parallel engines"),
        ({"forked_workers": True}, "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    ],
)
def test_what_a_server_lacks_is_said_with_the_values_to_start_it_with(tmp_path, change, words):
    sync, policy = make_sync(tmp_path, FakeAdapterServer(adapters=replace(ABLE, **change)))
    with pytest.raises(ServerCapabilityError, match=rf"{words}.*Start it with --enable-lora --max-lora-rank 8 --max-loras 3"):
        sync.push(policy, 0)


@pytest.mark.parametrize(
    ("workers", "method", "forked"), [(2, "fork", True), (2, "spawn", False), (1, "fork", False), (2, None, False)]
)
def test_what_a_server_says_of_itself_tells_forked_workers(workers, method, forked):
    lora_config = {"max_lora_rank": 16, "max_loras": 4}
    config = {
        "model_config": {"model": "m", "dtype": "torch.bfloat16", "max_model_len": 64},
        "lora_config": lora_config,
        "parallel_config": {"tensor_parallel_size": workers},
    }
    environment = {} if method is None else {"VLLM_WORKER_MULTIPROC_METHOD": method}
    page = json.dumps({"vllm_config": config, "vllm_env": environment, "workers": []}).encode()
    with answering(200, page) as url:
        adapters = ServerClient(url, 5.0, key="k").facts().adapters
    assert adapters is not None and adapters.forked_workers == forked and adapters.max_lora_rank == 16


def test_without_adapters_in_the_server_auto_sends_the_merged_weights_and_warns(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path / "weights"))
    server = FakeAdapterServer(adapters=None, reference=served_logprobs)
    sync, policy = make_sync(tmp_path, server)
    move(policy, 1)
    with caplog.at_level(logging.WARNING):
        sync.push(policy, 0)
    assert "start vLLM with --enable-lora --max-lora-rank 8 --max-loras 3 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in caplog.text
    expected = dict(gathered_parameters(policy.model, None, keep=True))
    assert server.weights.keys() == expected.keys() and sync.served_as is None
    for name, tensor in server.weights.items():
        assert torch.equal(tensor, expected[name]), name
    sync.close()


@pytest.mark.parametrize("options", [{"r": 4}, {"r": 4, "use_dora": True}])
def test_a_real_server_without_adapters_serves_the_merged_weights(tmp_path, vllm_server, monkeypatch, options):
    """The check after each push compares the server's log-probabilities with those of the trainer's adapter."""
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    config = grpo_config(output_dir=str(tmp_path), vllm_server_base_url=vllm_server.url, peft=options, weight_check_steps=1)
    sync, policy = ServerSync(config, ONE_RANK, build_tokenizer()), tiny_policy(config)
    for version in range(3):
        move(policy, version)
        assert sync.push(policy, version)["perf/weight_probe_abs_diff"] < 1e-3
    assert sync.served_as is None
    sync.close()


def test_lora_is_not_replaced_by_merged_weights(tmp_path):
    sync, policy = make_sync(tmp_path, FakeAdapterServer(adapters=None), weight_sync="lora")
    with pytest.raises(ServerCapabilityError, match="takes no adapters: start it with --enable-lora --max-lora-rank 8"):
        sync.push(policy, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft": {"use_dora": True}}, "peft use_dora sends whole weights"),
        ({"peft": None}, "a run without `peft` sends whole weights"),
        ({"weight_sync": "shared_storage"}, "weight_sync=shared_storage sends whole weights"),
    ],
)
def test_whole_weights_are_never_sent_to_a_server_with_adapters(tmp_path, fields, words):
    sync, policy = make_sync(tmp_path, FakeAdapterServer(), **fields)
    with pytest.raises(ServerCapabilityError, match=re.escape(words) + r".*start it without --enable-lora"):
        sync.push(policy, 0)
