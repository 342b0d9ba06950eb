"""Adapters in a real CPU server: what they serve, how they leave, and whole runs on them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig

from tests.support.fault_proxy import GENERATION, FaultProxy
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tiny_model, build_tokenizer
from tests.support.waiting import wait_until
from trainers import AsyncGRPOConfig, AsyncGRPOTrainer, evaluate, lora
from trainers.adapters import version_of
from trainers.data import PromptBuilder
from trainers.errors import ServerCapabilityError, ServerError
from trainers.model import probe_logprobs
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import RequestFailed
from trainers.roster import Listed, read_serving, write_servers
from trainers.server import ServerClient
from trainers.weight_sync.lora import FOLDER
from trainers.weight_sync.sync import ServerSync

MAX_STALENESS = 1


@dataclasses.dataclass
class AdapterServer:
    url: str
    key: str
    model_dir: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    from infra.leases import LeaseManager
    from infra.registry import Registry
    from infra.vllm import ServerSpec, start_server
    from tests.conftest import HOME  # not above: the rollout process imports this module, and needs its environment

    model_dir = build_tiny_model(tmp_path_factory.mktemp("adapter-model"), seed=0)
    needs = grpo_config(peft={"r": 8}, max_staleness=MAX_STALENESS).adapter_serving
    assert needs is not None
    spec = ServerSpec(
        str(model_dir), name="adapters", device="cpu", max_lora_rank=needs.max_lora_rank, max_loras=needs.max_loras
    )
    with LeaseManager(Registry(HOME / "adapter-server.db")) as leases:
        log = tmp_path_factory.mktemp("adapter-server") / "log"
        running = start_server(spec, leases.lease_port(), log_path=log)
        try:
            running.wait_ready()
            yield AdapterServer(running.url, running.api_key, model_dir)
        finally:
            running.stop()


@pytest.fixture
def key(server: AdapterServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)


def make_sync(server: AdapterServer, folder: Path, **fields: Any) -> tuple[ServerSync, Any]:
    options = {"peft": {"r": 8}, "max_staleness": MAX_STALENESS, "weight_check_steps": 1, "output_dir": str(folder)} | fields
    config = grpo_config(vllm_server_base_url=server.url, vllm_server_timeout=60, **options)
    return ServerSync(config, ONE_RANK, build_tokenizer()), tiny_policy(config)


def versions(client: ServerClient) -> list[int]:
    found = (version_of(name) for name in client.loaded_adapters())
    return sorted(version for version in found if version is not None)


def move(policy: Any, seed: int, size: float = 0.1) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for parameter in lora.adapter_parameters(policy.model).values():
        parameter.data += size * torch.randn(parameter.shape, generator=generator)


async def ask(server: AdapterServer, adapter: str | None, version: int, count: int = 6, **options: Any) -> list[Any]:
    """Turns through the pool that rollouts use; what fails is its exception."""
    pool = ServerPool([server.url], 60, 64, unreachable_s=2.0)
    await pool.open(60)
    prompts = [np.arange(3 + index, 20 + index, dtype=np.int32) for index in range(count)]
    leases = [pool.lease() for _ in prompts]
    request = {"temperature": 1.0, "max_tokens": 24, "seed": 5} | options
    try:
        return await asyncio.gather(
            *(
                pool.turn(prompt, lease=lease, version=lambda: version, adapter=adapter, **request)
                for prompt, lease in zip(prompts, leases, strict=True)
            ),
            return_exceptions=True,
        )
    finally:
        await pool.close()


def test_an_adapter_serves_what_the_trainer_computes_and_older_ones_what_they_did(server, key, tmp_path):
    """The probe of every push compares log-probabilities of sampled tokens too: `weight_check_steps=1`."""
    sync, policy = make_sync(server, tmp_path)
    sync.push(policy, 0)
    first = sync.served_as
    before = asyncio.run(ask(server, first, 0))
    move(policy, 1)
    metrics = sync.push(policy, 1)
    assert metrics["perf/weight_probe_abs_diff"] < 1e-3 and metrics["perf/weight_sync_pause_s"] == 0
    turns = asyncio.run(ask(server, sync.served_as, 1))
    for turn in turns:
        tokens = np.concatenate([turn.prompt_ids, turn.output_ids]).astype(np.int32)
        expected = probe_logprobs(policy, tokens, ONE_RANK.device)[len(turn.prompt_ids) - 1 :]
        assert np.abs(turn.output_logprobs - expected).max() < 1e-3
        assert [(span.start, span.stop, span.version) for span in turn.spans] == [(0, len(turn.output_ids), 1)]
    assert any(not np.array_equal(one.output_ids, two.output_ids) for one, two in zip(before, turns, strict=True))
    again = asyncio.run(ask(server, first, 0))
    for one, two in zip(before, again, strict=True):
        assert np.array_equal(one.output_ids, two.output_ids), "a prefix of another version, or another version's adapter"
        assert np.allclose(one.output_logprobs, two.output_logprobs, atol=1e-4)
    sync.close()


def test_the_window_moves_on_under_load_and_nothing_is_aborted(server, key, tmp_path):
    sync, policy = make_sync(server, tmp_path)
    sync.push(policy, 0)

    async def load() -> list[Any]:
        turns: list[Any] = []
        for version in range(1, 5):
            requests = asyncio.create_task(ask(server, sync.served_as, version - 1, count=12))
            move(policy, version, 0.02)
            await asyncio.to_thread(sync.push, policy, version)
            turns += await requests
        return turns

    turns = asyncio.run(load())
    assert all(hasattr(turn, "output_ids") and turn.finish_reason in ("stop", "length") for turn in turns), turns
    client = ServerClient(server.url, 60)
    assert versions(client) == [2, 3, 4]
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["policy-v2", "policy-v3", "policy-v4"]
    sync.close()


def test_an_adapter_that_left_is_told_from_one_that_a_restart_lost(server, key, tmp_path):
    sync, policy = make_sync(server, tmp_path)
    gone = None
    for version in range(4):
        sync.push(policy, version)
        gone = gone or sync.served_as
    (left,) = asyncio.run(ask(server, gone, 0, count=1))
    assert isinstance(left, RequestFailed) and left.cause == "stale"
    newest = sync.served_as
    assert newest is not None
    client = ServerClient(server.url, 60)
    for name in client.loaded_adapters():
        client.unload_adapter(name)
    (lost,) = asyncio.run(ask(server, newest, 3, count=1))
    assert isinstance(lost, ServerError) and "it was restarted" in str(lost)
    sync.push(policy, 4)
    assert versions(client) == [2, 3, 4], "the window is complete again"
    sync.close()


def test_a_rank_above_the_servers_is_said_with_the_values_to_start_it_with(server, key, tmp_path):
    sync, policy = make_sync(server, tmp_path, peft={"r": 9})
    with pytest.raises(ServerCapabilityError, match=r"at most rank 8: --max-lora-rank 16\. Start it with --enable-lora"):
        sync.push(policy, 0)


def letters(completions: list, **kwargs: Any) -> list[float]:
    """The share of digits: something a handful of steps can move."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in texts]


@pytest.mark.timeout(600)
def test_a_run_whose_only_server_dies_goes_on_with_a_replacement_that_has_the_adapters_before_its_first_request(
    server, key, tmp_path
):
    """Behind both addresses is one real server; at the second it holds no adapter, as a process that was just started."""
    folder = tmp_path / "run"
    serving: list[int | None] = []

    def replace(first: FaultProxy, second: FaultProxy) -> None:
        wait_until(lambda: any((one.version or 0) >= 2 for one in read_serving(folder)), 600, "two steps")
        first.go_away()
        client = ServerClient(server.url, 60)
        for name in client.loaded_adapters():
            client.unload_adapter(name)
        write_servers(folder, [Listed("replacement", second.url)])
        wait_until(lambda: [one.name for one in read_serving(folder)] == ["replacement"], 600, "the replacement is in")
        serving.extend(one.version for one in read_serving(folder))

    with FaultProxy(server.url).run() as first, FaultProxy(server.url).run() as second:
        args = AsyncGRPOConfig(
            output_dir=str(folder),
            vllm_server_base_url=first.url,
            vllm_server_timeout=60.0,
            max_steps=8,
            num_generations=4,
            max_completion_length=8,
            per_device_train_batch_size=8,
            gradient_checkpointing=False,
            max_staleness=MAX_STALENESS,
            weight_sync="lora",
            weight_check_steps=1,
        )
        adapter = LoraConfig(r=8, target_modules="all-linear")
        rows = [{"prompt": f"{i}+{i}="} for i in range(200)]
        trainer = AsyncGRPOTrainer(str(server.model_dir), letters, args, rows, peft_config=adapter)
        with ThreadPoolExecutor(1) as threads:
            replaced = threads.submit(replace, first, second)
            trainer.train()
            replaced.result()
        assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 8
        assert serving and serving[0] is not None and serving[0] >= 2, "it came in with the policy of that moment"
        loaded: set[str] = set()
        for path, name, status in second.seen:
            if path == "/v1/load_lora_adapter" and status == 200:
                loaded.add(name)
            elif path in GENERATION:
                assert name in loaded and status != 404, f"{name} was asked for when it was not there"
        assert second.requests > 0 and first.requests > 0
        assert max(versions(ServerClient(server.url, 60))) == 8


def test_a_run_learns_through_its_adapter_and_is_evaluated_on_it(server, key, tmp_path):
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "run"),
        vllm_server_base_url=server.url,
        vllm_server_timeout=120.0,
        max_steps=12,
        num_generations=8,
        max_completion_length=12,
        per_device_train_batch_size=32,
        learning_rate=2e-2,
        score_centering=False,
        gradient_checkpointing=False,
        max_staleness=MAX_STALENESS,
        weight_sync="lora",
        weight_check_steps=4,
        save_steps=6,
    )
    rows = [{"prompt": f"{i}+{i}="} for i in range(40)]
    lora_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    trainer = AsyncGRPOTrainer(str(server.model_dir), letters, args, rows * 10, peft_config=lora_config)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 12 and np.isfinite([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]).all()
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    # What is evaluated is the adapter: the served model itself is what the run began with.
    builder = PromptBuilder(trainer.processing_class, trainer.config)
    problems = [builder.prompt(0, index, row) for index, row in enumerate(rows)]
    adapter = evaluate.newest_adapter(server.url, 60)
    assert adapter is not None and version_of(adapter) == 12
    tokenizer = trainer.processing_class

    def accuracy(generate: evaluate.Generate) -> float:
        return evaluate.evaluate(problems, tokenizer, generate, letters)["accuracy"]

    base, adapted = (accuracy(evaluate.server_generate([server.url], 60, 12, adapter=name)) for name in (None, adapter))
    assert adapted > base + 0.1
    local = evaluate.plain_model(str(tmp_path / "run" / "checkpoint-12"), trainer.config)
    same = accuracy(evaluate.local_generate(local, tokenizer, 12))
    assert same == pytest.approx(adapted, abs=0.02), "the checkpoint's adapter is the one served"
