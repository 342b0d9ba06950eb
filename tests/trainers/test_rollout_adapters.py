"""Rollouts of policy versions that are adapters: which one a request names, and what becomes of one that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.support.pools import until
from tests.support.rollout_runs import by_rank, running
from tests.support.stub_server import StubServer
from trainers.adapters import adapter_name
from trainers.errors import DatasetError, ServerError
from trainers.rollouts.client import GenerateClient
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import RequestFailed
from trainers.types import Prompt, Rollout, VersionSpan

PROMPT = np.array([2, 60, 3], np.int32)
ZERO, ONE, TWO = (adapter_name(version, "aaaaaa") for version in range(3))


class AdapterStub(StubServer):
    """Refuses adapters it does not have, as vLLM does, and numbers its base weights as a fresh server."""

    def __init__(self, *adapters: str, **options: Any) -> None:
        super().__init__(**options)
        self.adapters = list(adapters)
        self.version = "default"

    @asynccontextmanager
    async def run(self, port: int = 0) -> AsyncIterator[AdapterStub]:
        async with super().run(port):
            yield self

    async def _models(self, request: web.Request) -> web.Response:
        listed = [{"id": "policy", "max_model_len": 64}, *({"id": name, "parent": "policy"} for name in self.adapters)]
        return web.json_response({"data": listed})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body and body["model"] != "policy" and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)
        return await super()._answer(request)


async def attempt(stub: StubServer, adapter: str | None, version: int) -> Any:
    client = GenerateClient(stub.url)
    await client.open(5)
    try:
        return await client.attempt(PROMPT, temperature=1.0, max_tokens=8, seed=5, version=version, adapter=adapter)
    finally:
        await client.close()


@pytest.mark.parametrize("generate", [True, False])
async def test_a_request_names_its_adapter_and_the_turn_has_its_version(generate: bool) -> None:
    async with AdapterStub(ONE, generate=generate).run() as stub:
        turn = await attempt(stub, ONE, 1)
    assert stub.requests[0]["model"] == ONE and stub.requests[0]["cache_salt"] == "1"
    assert turn.spans == [VersionSpan(0, 3, 1)], "what the server says of versions is of its base model"


async def test_an_adapter_that_left_is_told_from_one_that_was_lost() -> None:
    async with AdapterStub(ONE).run() as stub:
        with pytest.raises(RequestFailed, match=f"has let go of {ZERO}") as caught:
            await attempt(stub, ZERO, 0)
        assert caught.value.cause == "stale"  # type: ignore[attr-defined]
        with pytest.raises(ServerError, match=f"no longer has the adapter {TWO} .*restarted"):
            await attempt(stub, TWO, 2)
        stub.adapters = [adapter_name(9, "bbbbbb")]
        with pytest.raises(ServerError, match="restarted"):
            await attempt(stub, TWO, 2)


async def test_a_server_that_lost_its_adapters_gets_no_requests_until_the_newest_is_back() -> None:
    async with AdapterStub(ZERO, ONE).run() as good, AdapterStub(ZERO, ONE).run() as bad:
        pool = ServerPool([bad.url, good.url], 30, 100, first_pause_s=0.01, look_every_s=0.02)
        await pool.open(5)
        lease = pool.lease()
        request = {"lease": lease, "temperature": 1.0, "max_tokens": 8, "seed": 5}
        await pool.turn(PROMPT, version=lambda: 1, adapter=ONE, **request)
        assert len(bad.requests) == 1
        bad.adapters = []
        await pool.turn(PROMPT, version=lambda: 1, adapter=ONE, **request)
        assert len(good.requests) == 1 and "lost its weights" in pool.describe()
        bad.adapters = [ZERO]
        await pool.turn(PROMPT, version=lambda: 0, adapter=ZERO, **request)  # an older rollout asks for what is there
        await asyncio.sleep(1.2)  # looks at a server that is out are at most half a second apart
        assert "lost its weights" in pool.describe(), "the newest version is still missing"
        bad.adapters = [ZERO, ONE]
        await until(lambda: "lost its weights" not in pool.describe())
        await pool.close()


class TwoTurns(AsyncRolloutLoop):
    """Each rollout asks twice, and goes on only when the test says so."""

    gate: asyncio.Event
    instance: TwoTurns

    async def setup(self) -> None:
        type(self).instance, type(self).gate = self, asyncio.Event()

    async def generate_one(self, prompt: Prompt) -> Rollout:
        first = await self.turn(prompt.token_ids)
        await self.gate.wait()
        second = await self.turn(prompt.token_ids)
        said = [{"role": "assistant", "content": "42"}]
        return Rollout(prompt, [first, second], said)


async def test_all_turns_of_a_rollout_use_the_adapter_it_began_with() -> None:
    stub = AdapterStub(ZERO, ONE)
    async with running(stub, [by_rank], prompts=2, loop_class=TwoTurns, max_staleness=1) as engine:
        engine.synced(0, ZERO)
        await until(lambda: len(stub.requests) == 6)
        engine.synced(1, ONE)
        TwoTurns.gate.set()
        step = await engine.step(1, 1)
    assert [request["model"] for request in stub.requests] == [ZERO] * 12
    assert step is not None and step.totals.groups == 2


async def test_rollouts_whose_adapter_leaves_the_window_are_given_up_and_count_as_stale() -> None:
    stub = AdapterStub(ZERO, ONE, TWO)
    async with running(stub, [by_rank], prompts=2, loop_class=TwoTurns, max_staleness=1) as engine:
        engine.synced(0, ZERO)
        await until(lambda: len(stub.requests) == 6)
        engine.synced(1, ONE)
        await asyncio.sleep(0.1)
        assert engine.source._begun, "version 0 is in the window of 1"  # type: ignore[attr-defined]
        engine.synced(2, TWO)
        with pytest.raises(DatasetError, match=r"all 2 groups were dropped \(2 stale\)"):  # the whole epoch was given up
            await engine.step(1, 2)
        assert engine.ledger.summary == {0: {"trained": 0, "dropped": {"stale": 2}}}
        assert not engine.source._begun and engine.source._pool.in_flight == 0  # type: ignore[attr-defined]
    assert len(stub.requests) == 6, "no second turn was asked for"
