"""Several servers as one: routing, affinity, fail-over, budgets, and when a run has no server left."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from pydantic import ValidationError

from tests.support.fake_engine import fake_config
from tests.support.pools import one_turn, pool_of, until
from tests.support.stub_server import StubServer
from trainers.errors import ServerError
from trainers.metrics import spec_of
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import RequestFailed

PAGE = 'vllm:kv_cache_usage_perc {usage}\nvllm:cache_config_info{{kv_cache_size_tokens="{tokens}"}} 1.0\n'


# Tries and budget


@pytest.mark.parametrize("fault", [500, 503, "reset", "abort"])
async def test_passing_faults_are_tried_again(fault: int | str) -> None:
    stub = StubServer()
    async with pool_of(stub) as (pool, retries):
        stub.faults.extend([fault, fault])
        assert len((await one_turn(pool)).output_ids) == 3
        assert len(stub.requests) == 3 and len(retries) == 2 and len(set(retries)) == 1 and pool.trouble == ""


async def test_a_refused_request_is_not_sent_again_anywhere() -> None:
    first, second = StubServer(), StubServer()
    async with pool_of(first, second) as (pool, retries):
        first.faults.append(400)
        second.faults.append(400)
        with pytest.raises(RequestFailed, match="told to answer 400"):
            await one_turn(pool)
        assert len(first.requests) + len(second.requests) == 1 and not retries


async def test_one_budget_bounds_all_tries() -> None:
    stub = StubServer()
    async with pool_of(stub, budget_s=0.3, first_pause_s=0.05) as (pool, _):
        stub.faults.extend([500] * 50)
        with pytest.raises(RequestFailed, match=r"told to answer 500.*given up after") as caught:
            await one_turn(pool)
        assert caught.value.cause == "http_500" and len(stub.requests) < 10


async def test_an_answer_that_was_lost_leaves_time_for_another_try() -> None:
    stub = StubServer()
    async with pool_of(stub, budget_s=1.0) as (pool, retries):
        stub.faults.append("hang")
        assert len((await one_turn(pool)).output_ids) == 3 and retries == ["timeout"]
        stub.faults.extend(["hang"] * 2)
        with pytest.raises(
            RequestFailed, match=r"answer within 0\.\d s \(given up after 2 tries in vllm_server_timeout, 1 s"
        ) as caught:
            await one_turn(pool)
        assert caught.value.cause == "timeout"


# Routing


async def test_conversations_go_to_the_least_loaded_server_and_stay_there() -> None:
    stubs = [StubServer(), StubServer()]
    async with pool_of(*stubs) as (pool, _):
        leases = [pool.lease() for _ in range(6)]
        for _ in range(4):
            await asyncio.gather(*(one_turn(pool, lease) for lease in leases))
        assert [len(stub.requests) for stub in stubs] == [12, 12] and pool.in_flight == 6
        for lease in leases[:4]:
            pool.release(lease)
        assert pool.in_flight == 2 and pool.room(98) and not pool.room(99)


async def test_a_server_with_less_cache_gets_less() -> None:
    small, large = StubServer(max_model_len=32), StubServer(max_model_len=64)
    small.metrics, large.metrics = PAGE.format(usage=0.7, tokens=4 * 32), PAGE.format(usage=0.7, tokens=12 * 32)
    async with pool_of(small, large) as (pool, _):
        assert pool.cap == 16.0
        leases = [pool.lease() for _ in range(16)]
        await asyncio.gather(*(one_turn(pool, lease) for lease in leases))
        assert (len(small.requests), len(large.requests)) == (4, 12)


async def test_the_ceiling_is_shared_and_one_group_always_runs() -> None:
    stubs = [StubServer(), StubServer()]
    async with pool_of(*stubs, ceiling=5) as (pool, _):
        assert pool.cap == 5.0 and pool.room(8)
        lease = pool.lease()
        assert pool.room(4) and not pool.room(5)
        pool.changed.clear()
        pool.release(lease)
        assert pool.changed.is_set()


async def test_the_cap_follows_the_servers_metrics() -> None:
    stub = StubServer()
    stub.metrics = PAGE.format(usage=0.9, tokens=10 * 64)
    async with pool_of(stub) as (pool, _):
        leases = [pool.lease() for _ in range(10)]
        await until(lambda: pool.cap == 7.0)
        assert pool.changed.is_set() and not pool.room(1)
        stub.metrics = PAGE.format(usage=0.1, tokens=10 * 64)
        await asyncio.sleep(0.1)
        for lease in leases:
            pool.release(lease)
        await until(lambda: pool.students.all[0]._load is not None and pool.students.all[0]._load.kv_cache_usage == 0.1)
        for _ in range(7):
            pool.release(pool.lease(), finished=False)
        assert pool.cap <= 8.75
        for _ in range(30):
            pool.release(pool.lease())
        assert pool.cap > 10


async def test_every_gauge_is_in_the_catalog() -> None:
    told, mute = StubServer(), StubServer()
    told.metrics = PAGE.format(usage=0.5, tokens=640) + "vllm:generation_tokens_total 10\nvllm:num_requests_running 2\n"
    async with pool_of(told, mute) as (pool, _):
        pool.lease()
        gauges = pool.gauges()
        assert all(spec_of(name) for name in gauges)
        assert gauges["rollout/concurrency"] == 1 and gauges["rollout/concurrency_cap"] == 100
        assert gauges["server/student-0/kv_cache_usage"] == 0.5 and gauges["server/student-0/running"] == 2
        assert gauges["server/student-0/concurrency_cap"] == 10 and gauges["server/student-1/concurrency_cap"] == 100
        assert "server/student-1/running" not in gauges
        told.metrics = told.metrics.replace("total 10", "total 5000")
        await until(lambda: pool.gauges()["server/student-0/generated_tok_s"] > 0)


async def test_the_shortest_max_model_len_counts(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(StubServer(max_model_len=length).run()) for length in (64, 48)]
        pool = ServerPool([stub.url for stub in stubs], 5, 10)
        assert (await pool.open(5)).max_model_len == 48 and "max_model_len differ" in caplog.text
        await pool.close()


# Fail-over


async def test_a_fault_is_tried_on_another_server_at_once_and_the_conversation_moves() -> None:
    first, second = StubServer(), StubServer()
    async with pool_of(first, second, first_pause_s=1000) as (pool, retries):  # a pause would outlast the test
        lease = pool.lease()
        await one_turn(pool, lease)
        assert len(first.requests) == 1
        first.faults.append(500)
        await one_turn(pool, lease)
        await one_turn(pool, lease)
        assert (len(first.requests), len(second.requests)) == (2, 2) and retries == ["http_500"]
        pool.release(lease)
        assert pool.in_flight == 0


@pytest.mark.parametrize("fault", [500, "reset"])
async def test_a_server_that_answers_only_errors_does_not_attract_the_requests(fault: int | str) -> None:
    bad, good = StubServer(), StubServer()
    async with pool_of(bad, good) as (pool, _):
        bad.faults.extend([fault] * 1000)
        for _ in range(50):
            await one_turn(pool)
        assert len(good.requests) == 50 and len(bad.requests) < 10


async def test_a_server_that_went_away_is_left_and_taken_again_when_it_is_back() -> None:
    going, staying = StubServer(), StubServer()
    async with staying.run():
        async with going.run():
            pool = ServerPool([going.url, staying.url], 30, 100, look_every_s=0.02, unreachable_s=0.05)
            await pool.open(5)
            port = int(going.url.rsplit(":", 1)[1])
            await asyncio.gather(*(one_turn(pool) for _ in range(4)))
            assert len(going.requests) == 2
        for _ in range(20):
            await one_turn(pool)
        assert len(staying.requests) == 22 and "student-0" in pool.describe() and "unreachable" in pool.describe()
        assert pool.gauges()["rollout/concurrency_cap"] == 100
        async with going.run(port):
            await until(lambda: "unreachable" not in pool.describe())
            await asyncio.gather(*(one_turn(pool) for _ in range(4)))
            assert len(going.requests) == 4
        await pool.close()


async def test_a_server_whose_requests_all_broke_at_once_is_used_again_as_soon_as_a_look_finds_it_well() -> None:
    """It is looked at now, whenever the next look was due, and takes no rest: it failed once."""
    broken, other = StubServer(), StubServer()
    async with pool_of(broken, other, look_every_s=1000) as (pool, retries):
        broken.faults.extend(["reset"] * 4)
        await asyncio.gather(*(one_turn(pool) for _ in range(8)))
        assert retries == ["reset"] * 4 and (len(broken.requests), len(other.requests)) == (4, 8)
        await until(lambda: "student-0" not in pool.describe())
        await asyncio.gather(*(one_turn(pool) for _ in range(4)))
        assert (len(broken.requests), len(other.requests)) == (6, 10)


async def test_no_server_left_ends_the_run_before_the_budget() -> None:
    first, second = StubServer(), StubServer()
    async with first.run(), second.run():
        pool = ServerPool([first.url, second.url], 1000, 100, first_pause_s=0.02, unreachable_s=0.1, look_every_s=0.02)
        await pool.open(5)
    with pytest.raises(ServerError, match=r"student-0 \(http://.*\) has been unreachable for .*; student-1 .* unreachable for"):
        await one_turn(pool)
    await pool.close()


async def test_a_short_outage_of_the_only_server_costs_nothing() -> None:
    stub = StubServer()
    async with stub.run():
        pool = ServerPool([stub.url], 30, 100, first_pause_s=0.02, look_every_s=0.02)
        await pool.open(5)
        port = int(stub.url.rsplit(":", 1)[1])
    turn = asyncio.create_task(one_turn(pool))
    await until(lambda: pool.trouble != "")
    assert not turn.done()
    async with stub.run(port):
        assert len((await turn).output_ids) == 3
    await pool.close()


async def test_requests_on_a_server_that_hangs_are_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.rollouts.client.LOOK_S", 0.1)
    hanging, good = StubServer(), StubServer()
    async with pool_of(hanging, good, budget_s=1000) as (pool, retries):
        lease = pool.lease()
        hanging.faults.append("hang")
        turn = asyncio.create_task(one_turn(pool, lease))
        await until(lambda: len(hanging.requests) == 1)
        hanging.mute = True
        assert len((await turn).output_ids) == 3 and retries == ["timeout"] and len(good.requests) == 1
        hanging.mute = False
        await until(lambda: "unreachable" not in pool.describe())


async def test_the_only_server_is_waited_for_while_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server may answer late; what is in flight is not thrown away."""
    stub = StubServer()
    stub.delay_s = 0.5
    async with pool_of(stub) as (pool, retries):
        monkeypatch.setattr("trainers.rollouts.client.LOOK_S", 0.02)
        turn = asyncio.create_task(one_turn(pool))
        stub.mute = True
        assert len((await turn).output_ids) == 3 and not retries


# Settings


def test_the_servers_of_a_config() -> None:
    assert fake_config(vllm_server_base_url="http://a:1/").server_urls == ["http://a:1"]
    assert fake_config(vllm_server_base_url=["http://a:1/v1", "http://b:1"]).server_urls == ["http://a:1", "http://b:1"]
    with pytest.raises(ValidationError, match="http://a:1 is named twice"):
        fake_config(vllm_server_base_url=["http://a:1", "http://a:1/v1/"])
    with pytest.raises(ValidationError, match="name at least one"):
        fake_config(vllm_server_base_url=[])
    with pytest.raises(ValidationError, match="is no address of a server: write it as http"):
        fake_config(vllm_server_base_url="localhost:8000")
