"""One try of a generation request, against the stub and against the real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.stub_server import StubServer
from tests.support.weights import number_weights
from trainers.errors import ServerError
from trainers.rollouts.client import GenerateClient
from trainers.rollouts.protocol import RequestFailed, Retryable
from trainers.types import TurnRecord, VersionSpan

if TYPE_CHECKING:
    from tests.conftest import SharedServer


PROMPT = np.array([2, 60, 3], np.int32)


async def one_try(client: GenerateClient, max_tokens: int = 8) -> TurnRecord:
    return await client.attempt(PROMPT, temperature=1.0, max_tokens=max_tokens, seed=5, version=7)


async def test_a_turn_carries_ids_logprobs_and_the_servers_versions() -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url)
        await client.open(5)
        stub.version = "12"
        turn = await one_try(client)
        assert turn.output_ids.tolist() == [56, 54, 1] and turn.output_logprobs.tolist() == [-0.25] * 3
        assert turn.spans == [VersionSpan(0, 3, 12)] and turn.finish_reason == "stop"
        sent = stub.requests[0]
        assert sent["token_ids"] == PROMPT.tolist() and sent["cache_salt"] == "7" and sent["sampling_params"]["seed"] == 5
        assert (await one_try(client, max_tokens=2)).finish_reason == "length"
        await client.close()


@pytest.mark.parametrize("version", ["default", "6"])
async def test_a_server_that_lost_its_weights_says_so(version: str) -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url)
        await client.open(5)
        stub.version = version
        with pytest.raises(ServerError, match=f"answered with weights '{version}' although it holds version 7"):
            await one_try(client)
        await client.close()


async def test_completions_is_the_fallback() -> None:
    async with StubServer(generate=False).run() as stub:
        client = GenerateClient(stub.url)
        assert not (await client.open(5)).generate
        turn = await one_try(client)
        assert turn.output_ids.tolist() == [56, 54, 1] and turn.spans == [VersionSpan(0, 3, 7)]
        assert stub.requests[0]["return_token_ids"] is True
        await client.close()


@pytest.mark.parametrize(
    ("fault", "kind", "cause"),
    [
        (400, RequestFailed, "http_400"),
        (404, RequestFailed, "http_404"),
        (500, Retryable, "http_500"),
        (503, Retryable, "http_503"),
        ("reset", Retryable, "reset"),
        ("abort", Retryable, "aborted"),
    ],
)
async def test_what_may_be_tried_again_and_what_not(fault: int | str, kind: type[Exception], cause: str) -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url)
        await client.open(5)
        stub.faults.append(fault)
        with pytest.raises(kind, match=f"told to answer {fault}" if isinstance(fault, int) else None) as caught:
            await one_try(client)
        assert caught.value.cause == cause and len(stub.requests) == 1  # type: ignore[attr-defined]
        await client.close()


async def test_a_server_that_is_not_there() -> None:
    client = GenerateClient("http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9"):
        await client.open(0)
    await client.close()


async def test_a_server_that_went_away() -> None:
    async with StubServer().run() as stub:
        client = GenerateClient(stub.url)
        await client.open(5)
        await one_try(client)
    causes = []
    for _ in range(2):
        with pytest.raises(Retryable) as caught:
            await one_try(client)
        causes.append(caught.value.cause)
    # Whether or not the kept connection is known to be broken by then, a new one cannot be made.
    assert causes[0] in ("reset", "connection") and causes[1] == "connection"
    await client.close()


@pytest.mark.server
async def test_the_real_server_gives_what_the_stub_promises(vllm_server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    number_weights(vllm_server, 3)
    client = GenerateClient(vllm_server.url)
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(ServerError, match="refuses the key"):
        await client.open(5)
    await client.close()
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    facts = await client.open(30)
    longest = json.loads((vllm_server.model_dir / "config.json").read_text())["max_position_embeddings"]
    assert facts.generate and facts.max_model_len == longest
    assert facts.load is not None and facts.load.kv_tokens is not None and facts.load.kv_tokens > longest
    assert await client.healthy() and await client.weight_version() == "3"
    prompt = np.array([1, 4, 8, 9, 5], np.int32)
    turns = [await client.attempt(prompt, temperature=1.0, max_tokens=12, seed=seed, version=3) for seed in (1, 1, 2)]
    assert turns[0].output_ids.tolist() == turns[1].output_ids.tolist() != turns[2].output_ids.tolist()
    assert all((turn.output_logprobs <= 0).all() and len(turn.output_logprobs) == len(turn.output_ids) for turn in turns)
    assert turns[0].spans == [VersionSpan(0, len(turns[0].output_ids), 3)]
    after = await client.load()
    generated = sum(len(turn.output_ids) for turn in turns)
    assert after is not None and after.generated_tokens >= facts.load.generated_tokens + generated
    assert after.running == after.waiting == 0 and after.kv_cache_usage < 0.1
    with pytest.raises(ServerError, match="answered with weights '3' although it holds version 4"):
        await client.attempt(prompt, temperature=1.0, max_tokens=1, seed=1, version=4)
    with pytest.raises(RequestFailed) as caught:
        await client.attempt(np.zeros(600, np.int32), temperature=1.0, max_tokens=1, seed=1, version=3)
    assert caught.value.cause == "http_400"
    await client.close()
