"""Request bodies, and what is made of answers that are wrong or from other versions of the server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.stub_server import StubServer
from trainers.errors import ServerCapabilityError, ServerError
from trainers.rollouts.answers import read_answer
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import (
    COMPLETIONS,
    GENERATE,
    PLAIN,
    RequestFailed,
    Retryable,
    SamplingForm,
    refusal,
    request_body,
)
from trainers.types import VersionSpan

PROMPT = np.array([5, 9], np.int32)
TOPS = SamplingForm(top_logprobs=2)


def sent(form: SamplingForm, generate: bool = True, temperature: float = 0.7) -> tuple[str, dict[str, Any]]:
    path, body = request_body(form, generate, "policy", PROMPT, temperature=temperature, max_tokens=6, seed=2**62, version=4)
    return path, json.loads(body)


def test_a_generate_request_says_every_sampling_parameter() -> None:
    path, body = sent(SamplingForm(top_p=0.9, top_k=50, min_p=0.1, repetition_penalty=1.1))
    assert path == GENERATE
    assert body == {
        "model": "policy",
        "cache_salt": "4",
        "token_ids": [5, 9],
        "sampling_params": {
            "temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 6,
            "seed": 2**62, "logprobs": 0, "detokenize": False, "flat_logprobs": True,
            "extra_args": {"loopwright_hold_tokens": 64, "loopwright_arrays": 1}, "vllm_xargs": {"loopwright_hold_tokens": 64},
        },
    }  # fmt: skip


def test_top_logprobs_are_one_more_where_the_sampled_token_counts_among_them() -> None:
    sampling = sent(TOPS)[1]["sampling_params"]
    assert (sampling["logprobs"], sampling["flat_logprobs"]) == (3, True)
    path, body = sent(TOPS, generate=False)
    assert path == COMPLETIONS and body["logprobs"] == 2 and "flat_logprobs" not in body and "extra_args" not in body
    assert body["vllm_xargs"] == {"loopwright_hold_tokens": 64}
    assert body["prompt"] == [5, 9] and body["return_token_ids"] and body["return_tokens_as_token_ids"]


def test_a_greedy_request_to_a_server_with_candidate_sets_has_one_candidate() -> None:
    for form, expected in ((PLAIN, (0.0, 0)), (SamplingForm(candidates=True), (1.0, 1))):
        sampling = sent(form, temperature=0.0)[1]["sampling_params"]
        assert (sampling["temperature"], sampling["top_k"]) == expected


def answer(**changes: Any) -> bytes:
    """Two tokens with their tops; a change is a field of the choice, a field that is None is left out."""
    entries = [
        {"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 7, "logprob": -0.5, "rank": 1}]},
        {"token_id": 2, "logprob": -1.5, "rank": 2, "top_logprobs": [{"token_id": 3, "logprob": -0.2, "rank": 1}]},
    ]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [7, 2], "logprobs": {"content": entries}} | changes
    return json.dumps({"choices": [{key: value for key, value in choice.items() if value is not None}]}).encode()


def test_an_answer_by_hand_with_fewer_tops_than_asked_for() -> None:
    versions = [{"version": "4", "start": 0, "end": 1}, {"version": 5, "start": 1, "end": 2}]
    turn = read_answer(TOPS, answer(weight_versions=versions), PROMPT, 4)
    assert turn.output_ids.tolist() == [7, 2] and turn.output_logprobs.tolist() == [-0.5, -1.5]
    assert turn.spans == [VersionSpan(0, 1, 4), VersionSpan(1, 2, 5)] and turn.finish_reason == "stop"
    assert turn.top_ids is not None and turn.top_ids.tolist() == [[7, -1], [3, -1]]
    assert turn.top_logprobs is not None and turn.top_logprobs.dtype == np.float32
    np.testing.assert_allclose(turn.top_logprobs, [[-0.5, -np.inf], [-0.2, -np.inf]])


def test_an_older_server_writes_ids_as_text() -> None:
    entries = [{"token": "token_id:7", "logprob": -0.5, "top_logprobs": [{"token": "token_id:31", "logprob": -0.5}]}]
    turn = read_answer(TOPS, answer(token_ids=[7], logprobs={"content": entries}), PROMPT, 4)
    assert turn.top_ids is not None and turn.top_ids.tolist() == [[31, -1]]


@pytest.mark.parametrize("form", [PLAIN, TOPS, SamplingForm(top_logprobs=2, candidates=True)])
def test_an_empty_completion_is_an_answer(form: SamplingForm) -> None:
    turn = read_answer(form, answer(token_ids=[], logprobs={"content": []}), PROMPT, 4)
    assert len(turn.output_ids) == len(turn.output_logprobs) == 0 and turn.spans == [VersionSpan(0, 0, 4)]
    assert turn.top_ids is None or turn.top_ids.shape == (0, 2)


TEXT = {"token_logprobs": [-0.5, -1.5], "top_logprobs": [{" the": -0.5}, {" a": -0.2}]}
WRONG: list[tuple[SamplingForm, dict[str, Any], type[Exception], str]] = [
    (PLAIN, {"finish_reason": "abort"}, Retryable, "ended the request with 'abort'"),
    (PLAIN, {"token_ids": "7"}, Retryable, "not an answer"),
    (PLAIN, {"token_ids": [7]}, RequestFailed, "2 logprobs for 1 tokens"),
    (PLAIN, {"logprobs": None}, RequestFailed, "0 logprobs for 2 tokens"),
    (PLAIN, {"logprobs": {"token_logprobs": [None, -0.1]}}, RequestFailed, "no finite logprob"),
    (PLAIN, {"logprobs": {"token_logprobs": [-0.1, -9999.0]}}, RequestFailed, "no finite logprob"),
    (PLAIN, {"weight_versions": [{"version": "4", "start": 0, "end": 1}]}, RequestFailed, "do not cover 2 tokens"),
    (PLAIN, {"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, ServerError, "although it holds version 4"),
    (TOPS, {"logprobs": {"token_logprobs": [-0.5, -1.5]}}, RequestFailed, "0 top logprobs for 2 tokens"),
    (TOPS, {"logprobs": TEXT}, RequestFailed, "names a token by its text"),
    (SamplingForm(candidates=True), {"sampling_mask": [[7]]}, RequestFailed, "1 candidate sets for 2 tokens"),
    (SamplingForm(candidates=True), {"sampling_mask": "7"}, Retryable, "not an answer"),
]


@pytest.mark.parametrize(("form", "changes", "error", "message"), WRONG)
def test_an_answer_that_cannot_be_used_says_why(form, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        read_answer(form, answer(**changes), PROMPT, 4)


@pytest.mark.parametrize("data", [b"", b"<html>", b'{"choices": []}', answer()[:-20], b'{"choices": [{"index": 0}]}', b"\xff"])
def test_what_is_no_answer_may_be_asked_for_again(data: bytes) -> None:
    with pytest.raises(Retryable, match="not an answer") as caught:
        read_answer(PLAIN, data, PROMPT, 4)
    assert caught.value.cause == "bad_json"


def test_only_what_the_form_asks_for_explains_a_refusal() -> None:
    message = "Requested sample logprobs of 9, which is greater than max allowed: 5"
    remedy = refusal(SamplingForm(top_logprobs=8), message)
    assert remedy is not None and "--max-logprobs 9" in remedy and "num_sampler_logprobs" in remedy
    assert refusal(PLAIN, message) is None and refusal(SamplingForm(top_logprobs=8), "prompt too long") is None


async def test_a_server_that_returns_too_few_logprobs_ends_the_run_at_its_first_request() -> None:
    async with StubServer().run() as stub:
        stub.refuses = "Requested sample logprobs of 9, which is greater than max allowed: 5"
        pool = ServerPool([stub.url], 30, 4, form=SamplingForm(top_logprobs=8))
        await pool.open(5)
        lease = pool.lease()
        try:
            with pytest.raises(ServerCapabilityError, match="--max-logprobs 9"):
                await pool.turn(PROMPT, lease=lease, temperature=1.0, max_tokens=2, seed=0, version=lambda: 4)
        finally:
            pool.release(lease)
            await pool.close()
        assert len(stub.requests) == 1


@pytest.mark.server
def test_the_real_servers_top_logprobs_on_both_endpoints(vllm_server: Any) -> None:
    """The sampled token where it is likely, sorted, summing to less than one, equal on both endpoints for equal seeds."""
    form, turns = SamplingForm(top_logprobs=5), []
    with httpx.Client(base_url=vllm_server.url, headers=vllm_server.headers, timeout=60) as client:
        for generate in (True, False):
            path, body = request_body(form, generate, "policy", PROMPT, temperature=0.9, max_tokens=20, seed=11, version=None)
            response = client.post(path, content=body, headers={"Content-Type": "application/json"}).raise_for_status()
            turns.append(read_answer(form, response.content, PROMPT, None))
        too_many = SamplingForm(top_logprobs=20)
        _, body = request_body(too_many, True, "policy", PROMPT, temperature=1.0, max_tokens=1, seed=0, version=None)
        refused = client.post(GENERATE, content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400 and "--max-logprobs 21" in (refusal(too_many, refused.text) or "")
    assert turns[0].output_ids.tolist() == turns[1].output_ids.tolist() and len(turns[0].output_ids)
    for turn in turns:
        assert turn.top_ids is not None and turn.top_logprobs is not None and turn.top_ids.shape[1] == 5
        assert (np.diff(turn.top_logprobs, axis=1) <= 0).all() and (np.exp(turn.top_logprobs).sum(1) < 1).all()
        among = turn.top_ids == turn.output_ids[:, None]
        np.testing.assert_array_equal(turn.top_logprobs[among], turn.output_logprobs[among.any(1)])
        assert (turn.output_logprobs[~among.any(1)] <= turn.top_logprobs[~among.any(1), -1]).all()
    np.testing.assert_array_equal(turns[0].top_ids, turns[1].top_ids)  # type: ignore[arg-type]
