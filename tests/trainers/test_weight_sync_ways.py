"""Every way that needs no GPU against the real server: under load, refused, interrupted; and a broadcast whose peer is gone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.errors import ServerError, WeightSyncError
from trainers.model import Policy, probe_logprobs
from trainers.server import ServerClient, ServerFacts
from trainers.weight_sync import sparse
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.changes import Changes
from trainers.weight_sync.probe import probe_tokens
from trainers.weight_sync.shared_storage import SharedStorage
from trainers.weight_sync.sync import ServerSync
from trainers.weight_sync.ways import Way

pytestmark = pytest.mark.server

CPU = torch.device("cpu")
WAYS: dict[str, Callable[[Path], Way]] = {
    "file": lambda folder: SharedStorage(str(folder)),
    "gloo": lambda folder: Broadcast(CPU, "gloo", 20.0),
    "sparse": lambda folder: Changes(str(folder)),
    "sparse-gloo": lambda folder: Changes(str(folder), Broadcast(CPU, "gloo", 20.0)),
}


class FiveCalls(ServerClient):
    """As to a server without our middleware."""

    def facts(self) -> ServerFacts:
        return dataclasses.replace(super().facts(), one_call=False)


def make(server: Any, folder: Path, way: Way, client: type[ServerClient] = ServerClient) -> ServerSync:
    config = grpo_config(vllm_server_base_url=server.url, vllm_server_timeout=60, weight_check_steps=1, output_dir=str(folder))
    return ServerSync(config, ONE_RANK, build_tokenizer(), [client(server.url, 60, server.key)], way)


def nudge(policy: Policy, seed: int) -> None:
    """Change one weight in fifty, as a step in bfloat16 does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < 0.02
            parameter.add_(moved * 0.2 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(
    params=[(way, calls) for way in WAYS for calls in (ServerClient, FiveCalls)], ids=lambda p: f"{p[0]}-{p[1].__name__}"
)
def sync(request, vllm_server, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path))
    way, client = request.param
    sync = make(vllm_server, tmp_path, WAYS[way](tmp_path), client)
    yield sync
    sync.close()


async def test_syncs_under_load_abort_nothing_and_leave_no_stale_prefix(sync, vllm_server):
    """Requests in flight go on; each span of their tokens has the logprobs of the policy that it names."""
    policy, policies, stop = tiny_policy(seed=8), {}, asyncio.Event()
    tokens = probe_tokens(build_tokenizer(), 64)[:20].tolist()
    sampling = {"max_tokens": 200, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "ignore_eos": True}
    choices: list[dict[str, Any]] = []

    async def generate(client: httpx.AsyncClient, seed: int) -> dict[str, Any]:
        body = {"token_ids": tokens, "sampling_params": {**sampling, "seed": seed}, "cache_salt": "10"}
        answer = await client.post("/inference/v1/generate", json=body)
        return answer.raise_for_status().json()["choices"][0]

    async def requests(client: httpx.AsyncClient, seed: int) -> None:
        while not stop.is_set():
            choices.append(await generate(client, seed))

    async with httpx.AsyncClient(base_url=vllm_server.url, headers=vllm_server.headers, timeout=120) as client:
        running: list[asyncio.Task[None]] = []
        for version in range(10, 40):
            policies[version] = tiny_policy(seed=8)
            policies[version].model.load_state_dict(policy.model.state_dict())
            metrics = await asyncio.to_thread(sync.push, policy, version)
            assert metrics["perf/weight_probe_abs_diff"] < 1e-3
            nudge(policy, version)
            running = running or [asyncio.create_task(requests(client, seed)) for seed in range(4)]
            if version >= 12 and any(len(choice["weight_versions"]) > 1 for choice in choices):
                break
        stop.set()
        await asyncio.gather(*running)
        # A prompt repeated after the sync is computed with the new weights, also under the old cache salt.
        again = await generate(client, 0)

    assert all(choice["finish_reason"] == "length" and len(choice["token_ids"]) == 200 for choice in choices)
    spanning = [choice for choice in choices if len(choice["weight_versions"]) > 1]
    assert spanning, "no request was in flight during a sync"
    for choice in [*spanning[:6], again]:
        ids = np.array(tokens + choice["token_ids"], np.int32)
        got = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
        for span in choice["weight_versions"]:
            part = slice(span["start"], span["end"])
            expected = probe_logprobs(policies[int(span["version"])], ids, CPU)[len(tokens) - 1 :]
            np.testing.assert_allclose(got[part], expected[part], atol=2e-3)
    assert {span["version"] for span in again["weight_versions"]} == {str(version)}


def served(vllm_server) -> tuple[str, bool]:
    client = ServerClient(vllm_server.url, 60, vllm_server.key)
    return client.weight_version(), client.is_paused()


def test_only_what_changed_is_sent_and_everything_after_somebody_else_wrote(vllm_server, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path))
    sync = make(vllm_server, tmp_path, WAYS["sparse"](tmp_path))
    policy = tiny_policy(seed=1)
    everything = sync.push(policy, 1)["perf/weight_sync_bytes"]
    nudge(policy, 0)
    assert sync.push(policy, 2)["perf/weight_sync_bytes"] < 0.05 * everything
    assert sync.push(policy, 3)["perf/weight_sync_bytes"] == 0
    make(vllm_server, tmp_path, WAYS["file"](tmp_path)).push(tiny_policy(seed=2), 4)
    nudge(policy, 1)
    assert sync.push(policy, 5)["perf/weight_sync_bytes"] == everything  # the worker refused the patch
    sync.push(tiny_policy(seed=3), 6)  # all weights are others: a patch would be larger
    assert sync.way is not None and sync.way.bytes_sent == everything
    sync.close()


def test_a_patch_that_gives_other_bytes_is_refused_before_a_weight_is_touched(vllm_server, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path))
    sync = make(vllm_server, tmp_path, WAYS["sparse"](tmp_path))
    policy = tiny_policy(seed=1)
    sync.push(policy, 1)
    before = ServerClient(vllm_server.url, 60, vllm_server.key).prompt_logprobs(probe_tokens(build_tokenizer(), 64), 1)
    nudge(policy, 0)
    right = sparse.checksum
    monkeypatch.setattr("trainers.weight_sync.changes.sparse.checksum", lambda bucket: right(bucket) + 1)
    with pytest.raises(WeightSyncError, match="has checksum"):
        sync.push(policy, 2)
    assert served(vllm_server) == ("1", False)
    after = ServerClient(vllm_server.url, 60, vllm_server.key).prompt_logprobs(probe_tokens(build_tokenizer(), 64), 2)
    np.testing.assert_allclose(after, before, atol=1e-4)
    sync.close()


def test_a_trainer_that_stops_in_mid_broadcast_leaves_old_weights_and_the_second_try_works(vllm_server, tmp_path, monkeypatch):
    way = Broadcast(CPU, "gloo", 20.0)
    sync = make(vllm_server, tmp_path, way)
    sync.push(tiny_policy(seed=1), 1)
    right, seen = way._broadcast, []

    def cut(parts: list[torch.Tensor], futures: dict) -> None:
        seen.append(way.token)
        if len(seen) == 1:
            raise RuntimeError("the cable was pulled")
        right(parts, futures)

    monkeypatch.setattr(way, "_broadcast", cut)
    metrics = sync.push(tiny_policy(seed=2), 2)
    assert metrics["perf/weight_probe_abs_diff"] < 1e-3 and served(vllm_server) == ("2", False)
    assert len(set(seen)) == 2, "the second try used the broken group"
    sync.close()


def test_a_broadcast_that_never_comes_ends_at_the_deadline_on_the_old_weights(vllm_server, tmp_path, monkeypatch):
    way = Broadcast(CPU, "gloo", 2.0)
    sync = make(vllm_server, tmp_path, way)
    sync.push(tiny_policy(seed=1), 1)
    monkeypatch.setattr(way, "_broadcast", lambda parts, futures: None)
    with pytest.raises(WeightSyncError, match=r"did not end in time|Timed out waiting 2000ms"):  # whichever side notices first
        sync.push(tiny_policy(seed=2), 2)
    assert served(vllm_server) == ("1", False)
    monkeypatch.undo()
    assert sync.push(tiny_policy(seed=2), 3)["perf/weight_probe_abs_diff"] < 1e-3
    sync.close()


def test_a_group_does_not_wait_for_a_server_that_is_gone(vllm_server, tmp_path, monkeypatch):
    """Both servers fail the first try, since one broadcast is for all; the one that lives goes on alone."""
    way = Broadcast(CPU, "gloo", 20.0)
    config = grpo_config(vllm_server_timeout=60, weight_check_steps=1, output_dir=str(tmp_path))
    alive = ServerClient(vllm_server.url, 60, vllm_server.key)

    class Gone(ServerClient):
        """Answers until it is asked to join the group."""

        left = False

        def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
            self.left = True
            raise ServerError("connection reset")

        def wait_healthy(self, timeout_s: float | None = None) -> None:
            if self.left:
                raise ServerError("connection refused")
            super().wait_healthy(timeout_s)

    gone = Gone(vllm_server.url, 60, vllm_server.key)
    sync = ServerSync(config, ONE_RANK, build_tokenizer(), [gone, alive], way)
    monkeypatch.setattr("trainers.weight_sync.broadcast.CONNECT_TIMEOUT_S", 3600.0)  # it must not wait for who is gone
    sync.push(tiny_policy(seed=4), 1)
    assert [member.client for member in sync.members.inside] == [alive] and served(vllm_server) == ("1", False)
    sync.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["file", "gloo", "sparse"])
async def test_two_hundred_syncs_under_load(vllm_server, tmp_path, monkeypatch, way):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path))
    sync = make(vllm_server, tmp_path, WAYS[way](tmp_path))
    policy, done, stop = tiny_policy(seed=8), [], asyncio.Event()
    sampling = {"max_tokens": 100, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}

    async def requests(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            answer = await client.post("/inference/v1/generate", json={"token_ids": [1, 4, 8, 5], "sampling_params": sampling})
            done.append(answer.raise_for_status().json()["choices"][0])

    async with httpx.AsyncClient(base_url=vllm_server.url, headers=vllm_server.headers, timeout=120) as client:
        running = [asyncio.create_task(requests(client)) for _ in range(4)]
        for version in range(1, 201):
            nudge(policy, version)
            metrics = await asyncio.to_thread(sync.push, policy, version)
            assert metrics["perf/weight_probe_abs_diff"] < 1e-3
        stop.set()
        await asyncio.gather(*running)
    assert len(done) > 20 and all(c["finish_reason"] == "length" and len(c["token_ids"]) == 100 for c in done)
    sync.close()
