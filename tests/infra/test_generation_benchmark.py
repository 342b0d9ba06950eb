"""The generation benchmark against the real CPU server: every form is asked for, and what is missing is an error."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import numpy as np
import pytest

from benchmarks.generation import TOPS, measure, through_the_pool, timed
from benchmarks.sync_server import Server
from trainers.errors import ServerCapabilityError
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import SamplingForm

pytestmark = pytest.mark.server


def test_tokens_of_requests_that_wait_side_by_side_are_all_counted():
    async def ask(prompt: np.ndarray, tokens: int, seed: int) -> int:
        await asyncio.sleep(0)
        return tokens

    tokens, seconds, _ = asyncio.run(timed(ask, 20, 8, 4, 5, 64, seed=0))
    assert tokens == 100 and seconds > 0


@pytest.fixture(autouse=True)
def key(vllm_server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)


def test_all_forms_are_measured_and_set_against_the_first(vllm_server):
    args = Namespace(concurrent=4, prompt=8, output=8, rounds=2, vocabulary=64, one_by_one=False)
    found = asyncio.run(measure(Server(vllm_server.url, vllm_server.key, vllm_server.model_dir), args))
    speed = found["tokens_per_s"]
    assert set(speed) == set(found["client_cpu"]) == {"none", "sampled", "top8"}
    assert found["frac_sampled"] == pytest.approx(speed["sampled"] / speed["none"], abs=0.01)
    assert found["frac_top8"] == pytest.approx(speed["top8"] / speed["none"], abs=0.01)
    assert found["endpoint"] == "/inference/v1/generate"


def test_a_request_counts_its_tokens_and_a_server_that_returns_less_is_refused(vllm_server):
    async def ask(tops: int) -> int:
        pool = ServerPool([vllm_server.url], 60.0, 1, form=SamplingForm(top_logprobs=tops))
        try:
            await pool.open(30.0)
            return await through_the_pool(pool, tops)(np.array([1, 4, 8, 5], np.int32), 3, 7)
        finally:
            await pool.close()

    assert 1 <= asyncio.run(ask(TOPS)) <= 3
    with pytest.raises(ServerCapabilityError, match="--max-logprobs 65"):
        asyncio.run(ask(64))
