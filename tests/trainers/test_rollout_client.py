"""The generation client against faults, and against the real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.stub_server import StubServer
from tests.support.weights import number_weights
from trainers.errors import ServerError
from trainers.rollouts.client import GenerateClient, RequestFailed
from trainers.types import TurnRecord, VersionSpan

if TYPE_CHECKING:
    from tests.conftest import SharedServer


PROMPT = np.array([2, 60, 3], np.int32)


async def one_turn(client: GenerateClient, max_tokens: int = 8) -> TurnRecord:
    return await client.turn(PROMPT, temperature=1.0, max_tokens=max_tokens, seed=5, version=lambda: 7)


async def test_a_turn_carries_ids_logprobs_and_the_servers_versions() -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url, 10)
        await client.open(5)
        stub.version = "12"
        turn = await one_turn(client)
        assert turn.output_ids.tolist() == [56, 54, 1] and turn.output_logprobs.tolist() == [-0.25] * 3
        assert turn.spans == [VersionSpan(0, 3, 12)] and turn.finish_reason == "stop"
        sent = stub.requests[0]
        assert sent["token_ids"] == PROMPT.tolist() and sent["cache_salt"] == "7" and sent["sampling_params"]["seed"] == 5
        assert (await one_turn(client, max_tokens=2)).finish_reason == "length"
        await client.close()


@pytest.mark.parametrize("version", ["default", "6"])
async def test_a_server_that_lost_its_weights_ends_the_run(version: str) -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url, 10)
        await client.open(5)
        stub.version = version
        with pytest.raises(ServerError, match=f"answered with weights '{version}' although it holds version 7"):
            await one_turn(client)
        await client.close()


async def test_completions_is_the_fallback() -> None:
    async with StubServer(generate=False).run() as stub:
        client = GenerateClient(stub.url, 10)
        assert not (await client.open(5)).generate
        turn = await one_turn(client)
        assert turn.output_ids.tolist() == [56, 54, 1] and turn.spans == [VersionSpan(0, 3, 7)]
        assert stub.requests[0]["return_token_ids"] is True
        await client.close()


async def test_a_refused_request_is_not_sent_again() -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url, 10)
        await client.open(5)
        stub.faults.extend([400])
        with pytest.raises(RequestFailed, match="told to answer 400") as caught:
            await one_turn(client)
        assert caught.value.cause == "http_400" and len(stub.requests) == 1
        await client.close()


@pytest.mark.parametrize("fault", [500, 503, "reset", "abort"])
async def test_passing_faults_are_retried(fault: int | str) -> None:
    async with StubServer().run() as stub:
        retries: list[str] = []
        client = GenerateClient(stub.url, 30, retries.append, first_pause_s=0.01)
        await client.open(5)
        stub.faults.extend([fault, fault])
        assert len((await one_turn(client)).output_ids) == 3
        assert len(stub.requests) == 3 and len(retries) == 2
        await client.close()


async def test_one_budget_bounds_all_attempts() -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url, 0.3, first_pause_s=0.05)
        await client.open(5)
        stub.faults.extend([500] * 50)
        with pytest.raises(RequestFailed, match="given up after") as caught:
            await one_turn(client)
        assert caught.value.cause == "http_500" and len(stub.requests) < 10
        stub.faults.clear()
        stub.faults.append("hang")
        with pytest.raises(RequestFailed) as caught:
            await one_turn(client)
        assert caught.value.cause == "timeout"
        await client.close()


async def test_a_server_that_went_away_ends_the_run_before_the_budget() -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url, 1000, first_pause_s=0.02, unreachable_s=0.1)
        await client.open(5)
    with pytest.raises(ServerError, match="has been unreachable for"):
        await one_turn(client)
    await client.close()


async def test_a_server_that_is_not_there() -> None:
    client = GenerateClient("http://127.0.0.1:9", 1)
    with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9"):
        await client.open(0)
    await client.close()


@pytest.mark.server
async def test_the_real_server_gives_what_the_stub_promises(vllm_server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    number_weights(vllm_server, 3)
    client = GenerateClient(vllm_server.url, 120)
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(ServerError, match="refuses the key"):
        await client.open(5)
    await client.close()
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    facts = await client.open(30)
    assert (
        facts.generate
        and facts.max_model_len == json.loads((vllm_server.model_dir / "config.json").read_text())["max_position_embeddings"]
    )
    prompt = np.array([1, 4, 8, 9, 5], np.int32)
    turns = [await client.turn(prompt, temperature=1.0, max_tokens=12, seed=seed, version=lambda: 3) for seed in (1, 1, 2)]
    assert turns[0].output_ids.tolist() == turns[1].output_ids.tolist() != turns[2].output_ids.tolist()
    assert all((turn.output_logprobs <= 0).all() and len(turn.output_logprobs) == len(turn.output_ids) for turn in turns)
    assert turns[0].spans == [VersionSpan(0, len(turns[0].output_ids), 3)]
    with pytest.raises(ServerError, match="answered with weights '3' although it holds version 4"):
        await client.turn(prompt, temperature=1.0, max_tokens=1, seed=1, version=lambda: 4)
    with pytest.raises(RequestFailed) as caught:
        await client.turn(np.zeros(600, np.int32), temperature=1.0, max_tokens=1, seed=1, version=lambda: 3)
    assert caught.value.cause == "http_400"
    await client.close()
