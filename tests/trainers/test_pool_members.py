"""Which of a pool's servers count: those with the right weights, and those that are members now."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.support.pools import one_turn, pool_of, until
from tests.support.stub_server import StubServer
from trainers.errors import ServerError
from trainers.rollouts.pool import ServerPool

# Weights


async def test_a_server_with_old_weights_is_set_aside_until_it_has_newer_ones(caplog: pytest.LogCaptureFixture) -> None:
    old, good = StubServer(), StubServer()
    async with pool_of(old, good) as (pool, retries):
        old.version = old.weights = "default"
        await asyncio.gather(*(one_turn(pool) for _ in range(6)))
        assert len(good.requests) == 6 and set(retries) == {"old_weights"}
        assert caplog.text.count("student-0 gets no more requests") == 1
        sent = len(old.requests)
        await one_turn(pool)
        assert len(old.requests) == sent
        old.version = old.weights = "8"
        await until(lambda: "lost its weights" not in pool.describe())
        await asyncio.gather(*(one_turn(pool) for _ in range(4)))
        assert len(old.requests) == sent + 2


@pytest.mark.parametrize("servers", [1, 2])
async def test_wrong_weights_everywhere_end_the_run_when_none_came_back_in_time(servers: int) -> None:
    stubs = [StubServer() for _ in range(servers)]
    async with pool_of(*stubs, unreachable_s=0.1) as (pool, _):
        for stub in stubs:
            stub.version = stub.weights = "6"
        with pytest.raises(ServerError, match=r"student-0 .* has lost its weights: .* weights '6' although it holds"):
            await one_turn(pool)


async def test_a_server_that_comes_back_without_its_weights_gets_no_request() -> None:
    """Also over `/v1/completions`, whose answers do not tell."""
    restarted, good = StubServer(generate=False), StubServer(generate=False)
    async with good.run():
        async with restarted.run():
            pool = ServerPool([restarted.url, good.url], 30, 100, look_every_s=0.02)
            await pool.open(5)
            port = int(restarted.url.rsplit(":", 1)[1])
            await asyncio.gather(one_turn(pool), one_turn(pool))
        await until(lambda: "student-0" in pool.describe() and "unreachable" in pool.describe())
        restarted.weights = "default"
        async with restarted.run(port):
            await until(lambda: "weights 'default' although it should hold version 7" in pool.describe())
            await asyncio.gather(*(one_turn(pool) for _ in range(4)))
            assert len(restarted.requests) == 1
            restarted.weights = "7"
            await until(lambda: "lost its weights" not in pool.describe())
        await pool.close()


async def test_requests_wait_for_the_only_servers_weights_and_are_not_sent_meanwhile() -> None:
    """Also over `/v1/completions`, whose answers would be taken for the policy's."""
    stub, outages = StubServer(generate=False), []
    async with stub.run():
        pool = ServerPool([stub.url], 0.3, 100, first_pause_s=0.01, look_every_s=0.02, on_outage=lambda: outages.append(1))
        await pool.open(5)
        port = int(stub.url.rsplit(":", 1)[1])
        await one_turn(pool)
    turn = asyncio.create_task(one_turn(pool))
    await until(lambda: "unreachable" in pool.describe())
    stub.weights = "default"
    async with stub.run(port):
        await until(lambda: "lost its weights" in pool.describe())
        waited = len(outages)
        await until(lambda: len(outages) > waited + 1)
        assert not turn.done() and len(stub.requests) == 1
        stub.weights = "7"
        # The outage was longer than the request's whole budget: it does not count.
        assert len((await turn).output_ids) == 3
    await pool.close()


# Members


async def test_a_run_begins_with_the_servers_that_answer_and_the_others_join_when_they_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late, first = StubServer(), StubServer(max_model_len=32)
    async with late.run():
        port = int(late.url.rsplit(":", 1)[1])
    async with first.run():
        pool = ServerPool([late.url, first.url], 30, 100, look_every_s=0.02, unreachable_s=0.05, latecomers_s=0.05)
        assert (await pool.open(1000)).max_model_len == 32
        assert f"student-0 ({late.url}) does not answer yet" in caplog.text
        await asyncio.gather(*(one_turn(pool) for _ in range(4)))
        assert len(first.requests) == 4 and pool.describe() == first.url
        async with late.run(port):
            await until(lambda: "server/student-0/concurrency_cap" in pool.gauges())
            await asyncio.gather(*(one_turn(pool) for _ in range(4)))
            assert (len(late.requests), len(first.requests)) == (2, 6)
            await pool.close()


async def test_a_run_does_not_begin_where_no_server_answers_or_one_refuses_the_key() -> None:
    gone, first = StubServer(), StubServer()
    async with gone.run():
        pass
    pool = ServerPool([gone.url], 30, 100)
    with pytest.raises(ServerError, match="no answer from"):
        await pool.open(0.01)
    await pool.close()
    async with gone.run(int(gone.url.rsplit(":", 1)[1])), first.run():
        gone.locked = True
        pool = ServerPool([first.url, gone.url], 30, 100, latecomers_s=20)
        with pytest.raises(ServerError, match="refuses the key"):
            await pool.open(20)
        await pool.close()


async def test_what_a_server_was_asked_that_no_longer_listens_is_asked_elsewhere_at_once() -> None:
    """Even where its connections still stand, as those to a host that vanished do."""
    gone, good = StubServer(), StubServer()
    async with pool_of(gone, good, budget_s=1000) as (pool, retries):
        gone.faults.append("hang")
        turn = asyncio.create_task(one_turn(pool))
        await until(lambda: len(gone.requests) == 1)
        gone.mute = True  # so that looks at it come over new connections
        await gone.stop_listening()
        assert len((await turn).output_ids) == 3 and retries == ["timeout"] and len(good.requests) == 1


async def test_a_new_server_gets_requests_and_one_that_is_taken_away_none() -> None:
    first, second = StubServer(), StubServer()
    async with second.run(), pool_of(first) as (pool, retries):
        first.delay_s = 1000.0
        lease = pool.lease()
        turn = asyncio.create_task(one_turn(pool, lease))
        await until(lambda: len(first.requests) == 1)
        pool.members([("student-0", first.url), ("student-1", second.url)])
        await until(lambda: "server/student-1/concurrency_cap" in pool.gauges())
        await one_turn(pool)
        assert len(second.requests) == 1
        pool.members([("student-1", second.url)])
        # What it was computing is asked of the other at once.
        assert len((await turn).output_ids) == 3 and retries == ["timeout"] and len(second.requests) == 2
        await one_turn(pool, lease)
        assert len(second.requests) == 3 and len(first.requests) == 1
        pool.release(lease)
        assert pool.in_flight == 0 and pool.describe() == second.url
        assert not any(name.startswith("server/student-0/") for name in pool.gauges())


async def test_the_replacement_of_the_only_server_ends_the_wait_for_it() -> None:
    gone, new = StubServer(), StubServer()
    async with new.run():
        async with gone.run():
            pool = ServerPool([gone.url], 1000, 100, first_pause_s=0.01, look_every_s=0.02)
            await pool.open(5)
        turn = asyncio.create_task(one_turn(pool))
        await until(lambda: "unreachable" in pool.describe())
        pool.members([("student-0", new.url)])
        assert len((await turn).output_ids) == 3 and len(new.requests) == 1
        await pool.close()


async def test_a_new_server_that_does_not_answer_yet_joins_when_it_does_or_is_forgotten() -> None:
    first, late = StubServer(), StubServer()
    async with late.run():
        port = int(late.url.rsplit(":", 1)[1])
    async with pool_of(first, unreachable_s=0.05) as (pool, _):
        pool.members([("student-0", first.url), ("student-1", late.url)])
        await one_turn(pool)
        pool.members([("student-0", first.url)])
        assert not pool.students.joining
        pool.members([("student-0", first.url), ("student-1", late.url)])
        async with late.run(port):
            await until(lambda: "server/student-1/concurrency_cap" in pool.gauges())


@pytest.mark.parametrize("answer", ["<html>", '{"data": []}', "[]", 404, 503])
async def test_a_new_server_whose_address_another_program_has_meanwhile_joins_once_it_is_there(
    caplog: pytest.LogCaptureFixture, answer: str | int
) -> None:
    first, late, other = StubServer(), StubServer(), Other(answer)
    async with other.run():
        port = int(other.url.rsplit(":", 1)[1])
        async with pool_of(first, unreachable_s=0.05) as (pool, _):
            pool.members([("student-0", first.url), ("student-1", other.url)])
            await until(lambda: "student-1 does not join yet" in caplog.text and other.asked > 2)
            assert caplog.text.count("student-1 does not join yet") == 1
            await other.stop_listening()
            async with late.run(port):
                await until(lambda: "server/student-1/concurrency_cap" in pool.gauges())


class Other(StubServer):
    """No vLLM server: it gives one answer to everything, a text or a status."""

    def __init__(self, answer: str | int) -> None:
        super().__init__()
        self.answer, self.asked = answer, 0

    async def _models(self, request: web.Request) -> web.Response:
        self.asked += 1
        if isinstance(self.answer, int):
            return web.Response(status=self.answer)
        return web.Response(text=self.answer, content_type="application/json")
