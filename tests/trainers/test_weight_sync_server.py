"""Weight sync against the real server: what it serves then, refused updates, what a dead trainer left, requests in flight."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_model, build_tokenizer
from trainers.errors import WeightSyncError
from trainers.model import probe_logprobs
from trainers.server import ServerClient
from trainers.weight_sync.probe import probe_tokens
from trainers.weight_sync.sync import ServerSync


@pytest.fixture(autouse=True)
def _weights_stay_in_the_tests_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path / "weights"))


def real_sync(server, tmp_path) -> tuple[ServerSync, ServerClient]:
    config = grpo_config(
        vllm_server_base_url=server.url, vllm_server_timeout=120, weight_check_steps=1, output_dir=str(tmp_path)
    )
    client = ServerClient(server.url, 120, server.key)
    return ServerSync(config, ONE_RANK, build_tokenizer(), [client]), client


@pytest.mark.server
def test_the_real_server_serves_what_the_trainer_holds(vllm_server, tmp_path):
    sync, client = real_sync(vllm_server, tmp_path)
    for version, seed in ((1, 5), (2, 0)):
        policy = tiny_policy(seed=seed)
        assert sync.push(policy, version)["perf/weight_probe_abs_diff"] < 1e-3
        assert client.weight_version() == str(version) and not client.is_paused()
    sync.close()


@pytest.mark.server
def test_a_refused_update_leaves_the_real_server_on_the_old_weights_and_running(vllm_server, tmp_path):
    sync, client = real_sync(vllm_server, tmp_path)
    policy = tiny_policy(seed=6)
    sync.push(policy, 3)
    with pytest.raises(WeightSyncError, match="does not fit the served model"):
        sync.push(_narrow_policy(), 4)
    assert not client.is_paused() and client.weight_version() == "3"
    tokens = probe_tokens(build_tokenizer(), 64)
    difference = client.prompt_logprobs(tokens, 3) - probe_logprobs(policy, tokens, ONE_RANK.device)
    assert np.abs(difference).max() < 1e-3
    sync.close()


def _narrow_policy():
    from trainers import attention
    from trainers.model import build_policy

    model = build_model(layers=1)
    model.set_attn_implementation(attention.NAME)
    return build_policy(model, grpo_config(), ONE_RANK)


@pytest.mark.server
def test_a_session_that_a_dead_trainer_left_open_is_closed(vllm_server, tmp_path):
    left = ServerClient(vllm_server.url, 120, vllm_server.key)
    left.init_weight_transfer({"directory": str(tmp_path)})
    left.pause()
    left.start_update()
    sync, client = real_sync(vllm_server, tmp_path)
    assert sync.push(tiny_policy(seed=7), 5)["perf/weight_probe_abs_diff"] < 1e-3
    assert not client.is_paused()
    sync.close()


@pytest.mark.server
async def test_a_sync_under_load_aborts_nothing_and_leaves_no_stale_prefix(vllm_server, tmp_path):
    """Requests in flight go on; each span of their tokens has the logprobs of the policy that it names."""
    sync, _ = real_sync(vllm_server, tmp_path)
    policies = {10: tiny_policy(seed=8), 11: tiny_policy(seed=9)}
    sync.push(policies[10], 10)
    tokens = probe_tokens(build_tokenizer(), 64)[:20].tolist()
    sampling = {"max_tokens": 200, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "ignore_eos": True}

    async def generate(client: httpx.AsyncClient, seed: int) -> dict:
        body = {"token_ids": tokens, "sampling_params": {**sampling, "seed": seed}, "cache_salt": "10"}
        answer = await client.post("/inference/v1/generate", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]

    async with httpx.AsyncClient(base_url=vllm_server.url, headers=vllm_server.headers, timeout=120) as client:
        running = [asyncio.create_task(generate(client, seed)) for seed in range(8)]
        while "num_requests_running" not in (page := (await client.get("/metrics")).text) or not _running(page):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(sync.push, policies[11], 11)
        choices = await asyncio.gather(*running)
        # A prompt repeated after the sync is computed with the new weights, also under the old cache salt.
        again = await generate(client, 0)
    sync.close()

    assert all(choice["finish_reason"] == "length" and len(choice["token_ids"]) == 200 for choice in choices)
    versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
    assert "11" in versions, "the sync came after every request had ended"
    for choice in [*choices, again]:
        ids = np.array(tokens + choice["token_ids"], np.int32)
        expected = {
            version: probe_logprobs(policy, ids, ONE_RANK.device)[len(tokens) - 1 :] for version, policy in policies.items()
        }
        got = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
        for span in choice["weight_versions"]:
            part = slice(span["start"], span["end"])
            np.testing.assert_allclose(got[part], expected[int(span["version"])][part], atol=2e-3)
    assert {span["version"] for span in again["weight_versions"]} == {"11"}


def _running(page: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
