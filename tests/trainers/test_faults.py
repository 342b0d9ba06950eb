"""Runs of the rollout process against the real server, through a proxy that injects faults: each ends right, and counts agree.

The trainer is played here: it takes steps, commits them and numbers the server's weights.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.waiting import wait_until
from tests.support.weights import number_weights
from tests.trainers.test_rollout_process import grpo
from trainers.errors import RolloutFailures
from trainers.metrics import MetricBag
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.process import RolloutProcess
from trainers.types import PackedRow, StepHead

if TYPE_CHECKING:
    from tests.conftest import SharedServer

pytestmark = pytest.mark.server
PROMPTS, GENERATIONS = 8, 4


@dataclass
class Outcome:
    """What a run came to. `samples`: how many were trained of each prompt."""

    samples: Counter[tuple[int, ...]] = field(default_factory=Counter)
    metrics: MetricBag = field(default_factory=MetricBag)
    epochs: dict[str, Any] = field(default_factory=dict)

    def add(self, step: StepHead, rows: list[PackedRow]) -> None:
        for row in rows:
            for number, (start, stop) in enumerate(itertools.pairwise(row.cu_seqlens.tolist())):
                first = int(row.token_index[row.sequence_index == number].min())
                assert start <= first < stop
                self.samples[tuple(row.input_ids[start : first + 1].tolist())] += 1
        self.metrics.merge(step.metrics)

    def total(self, name: str) -> float:
        return self.metrics.values().get(name, 0.0)

    def failed(self) -> dict[str, float]:
        prefix = "rollout/failed_total/"
        return {name.removeprefix(prefix): value for name, value in self.metrics.values().items() if name.startswith(prefix)}


def train(process: RolloutProcess, server: SharedServer, after_step: Callable[[int], None] = lambda index: None) -> Outcome:
    """A run from start to end."""
    outcome = Outcome()
    number_weights(server, 0)
    process.synced(0)
    for index in itertools.count(1):
        step = process.next_step(index, index - 1)
        if step is None:
            break
        outcome.add(step, process.fetch(index, 0))
        process.committed(index)
        number_weights(server, index)
        process.synced(index)
        after_step(index)
    return outcome


@contextmanager
def running(
    tmp_path: Path, server: SharedServer, *proxies: FaultProxy, prompts: int = PROMPTS, **changes: Any
) -> Iterator[RolloutProcess]:
    changes = {"num_generations": GENERATIONS, "per_device_train_batch_size": 8, "vllm_server_timeout": 240.0} | changes
    urls = [proxy.url for proxy in proxies]
    process = RolloutProcess(grpo(tmp_path, server.model_dir, urls, prompts=prompts, **changes))  # type: ignore[arg-type]
    try:
        process.start(resume_dir=None, version=0, world_size=1, resume_step=0)
        yield process
    finally:
        process.close()


def finish(process: RolloutProcess, tmp_path: Path, outcome: Outcome) -> Outcome:
    outcome.epochs = process.snapshot(tmp_path / "end")["epochs"]
    return outcome


def nothing_was_lost(outcome: Outcome, prompts: int) -> None:
    """No rollout failed, and each was trained or, if the trainer went on without it for too long, dropped as stale."""
    epoch = outcome.epochs["0"]
    assert outcome.failed() == {} and epoch["dropped"].keys() <= {"stale"}
    assert epoch["trained"] + epoch["dropped"].get("stale", 0) == prompts and len(outcome.samples) == epoch["trained"]
    assert outcome.samples.total() + outcome.total("sample/dropped_stale_total") == prompts * GENERATIONS
    assert max(outcome.samples.values()) <= GENERATIONS


@pytest.fixture
def proxy(vllm_server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    with FaultProxy(vllm_server.url).run() as running:
        yield running


@pytest.fixture
def second(vllm_server: SharedServer) -> Iterator[FaultProxy]:
    with FaultProxy(vllm_server.url).run() as running:
        yield running


@pytest.mark.parametrize("fault", ["500", "reset", "half", "bad_json", "slow"])
def test_a_fault_that_passes_costs_no_rollout(
    tmp_path: Path, vllm_server: SharedServer, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.faults.extend([fault] * 5)
    with running(tmp_path, vllm_server, proxy) as process:
        outcome = finish(process, tmp_path, train(process, vllm_server))
    assert proxy.injected == {fault: 5} and not proxy.faults
    assert outcome.total("rollout/vllm_retry_total") == (0 if fault == "slow" else 5)
    assert outcome.failed() == {} and outcome.epochs == {"0": {"trained": PROMPTS, "dropped": {}}}
    assert len(outcome.samples) == PROMPTS and set(outcome.samples.values()) == {GENERATIONS}
    assert proxy.answered == PROMPTS * GENERATIONS


def test_an_answer_that_never_comes_is_asked_for_again(tmp_path: Path, vllm_server: SharedServer, proxy: FaultProxy) -> None:
    proxy.faults.extend(["lost"] * 3)
    with running(tmp_path, vllm_server, proxy, vllm_server_timeout=20.0) as process:
        outcome = finish(process, tmp_path, train(process, vllm_server))
    assert proxy.injected == {"lost": 3} and outcome.total("rollout/vllm_retry_total") == 3
    assert outcome.failed() == {} and outcome.epochs == {"0": {"trained": PROMPTS, "dropped": {}}}
    assert set(outcome.samples.values()) == {GENERATIONS}


def test_a_refused_request_costs_its_rollout_and_its_group_goes_on_if_two_remain(
    tmp_path: Path, vllm_server: SharedServer, proxy: FaultProxy
) -> None:
    """Requests come group by group: the first group loses two of its four, the third one three."""
    with running(tmp_path, vllm_server, proxy, max_rollout_failure_frac=0.5, max_concurrent_rollouts=GENERATIONS) as process:
        proxy.faults.extend(["400"] * 2 + ["slow"] * 2 + ["slow"] * 4 + ["400"] * 3)
        proxy.slow_s = 0.1  # so that a group's requests are all under way before any ends
        outcome = finish(process, tmp_path, train(process, vllm_server))
    assert outcome.failed() == {"http_400": 5} and outcome.total("rollout/vllm_retry_total") == 0
    assert outcome.epochs == {"0": {"trained": PROMPTS - 1, "dropped": {"failed": 1}}}
    assert outcome.total("rollout/dropped_groups_total/failed") == 1
    assert sorted(outcome.samples.values()) == [2] + [GENERATIONS] * (PROMPTS - 2)
    assert proxy.requests == PROMPTS * GENERATIONS


def test_a_server_that_refuses_everything_ends_the_run_in_its_own_words(
    tmp_path: Path, vllm_server: SharedServer, proxy: FaultProxy
) -> None:
    proxy.faults.extend(["400"] * 1000)
    with (
        running(tmp_path, vllm_server, proxy, prompts=40) as process,
        pytest.raises(RolloutFailures, match=r"\d+ × http_400: .*the proxy says 400"),
    ):
        train(process, vllm_server)


def test_a_server_that_is_gone_for_20_seconds_costs_nothing(
    tmp_path: Path, vllm_server: SharedServer, proxy: FaultProxy
) -> None:
    back: list[float] = []

    def outage(index: int) -> None:
        if index == 1:
            proxy.go_away()
            timer = threading.Timer(20, lambda: (back.append(time.monotonic()), proxy.come_back()))
            timer.start()

    with running(tmp_path, vllm_server, proxy, prompts=16, max_staleness=1) as process:
        outcome = finish(process, tmp_path, train(process, vllm_server, outage))
    assert back and outcome.total("rollout/vllm_retry_total") > 0
    nothing_was_lost(outcome, 16)


def test_one_of_two_servers_goes_away_and_comes_back(
    tmp_path: Path, vllm_server: SharedServer, proxy: FaultProxy, second: FaultProxy
) -> None:
    seen: dict[int, tuple[int, int]] = {}

    def outage(index: int) -> None:
        if index == 2:
            proxy.go_away()
        seen[index] = proxy.requests, second.requests
        if index == 4:
            looks = proxy.looks
            proxy.come_back()
            wait_until(lambda: proxy.looks > looks, what="a look at the first server")

    # A short queue: generation waits for the trainer, so however slow that is, many prompts are left once the first is back.
    with running(tmp_path, vllm_server, proxy, second, prompts=48, max_staleness=8, queue_maxsize=16) as process:
        outcome = finish(process, tmp_path, train(process, vllm_server, outage))
    nothing_was_lost(outcome, 48)
    assert min(seen[2]) >= 4, "both took part"
    assert seen[4][0] == seen[2][0] and seen[4][1] > seen[2][1]
    assert proxy.requests > seen[4][0], "the first is used again"
    values = outcome.metrics.values()
    for name in ("student-0", "student-1"):
        assert values[f"server/{name}/concurrency_cap"] >= 1 and values[f"server/{name}/kv_cache_usage"] <= 1


async def test_a_conversation_stays_on_its_server_and_moves_once_when_that_goes(
    vllm_server: SharedServer, proxy: FaultProxy, second: FaultProxy
) -> None:
    number_weights(vllm_server, 0)
    pool = ServerPool([proxy.url, second.url], 120, 64)
    facts = await pool.open(60)
    leases = [pool.lease() for _ in range(6)]
    prompts = [np.array([1, 4, 8 + i], np.int32) for i in range(6)]

    async def turns() -> None:
        for i, lease in enumerate(leases):
            turn = await pool.turn(prompts[i], lease=lease, temperature=1.0, max_tokens=4, seed=i, version=lambda: 0)
            prompts[i] = np.concatenate([turn.prompt_ids, turn.output_ids]).astype(np.int32)

    for _ in range(3):
        await turns()
    assert (proxy.requests, second.requests) == (9, 9) and max(map(len, prompts)) < facts.max_model_len
    await asyncio.to_thread(proxy.go_away)
    for _ in range(2):
        await turns()
    assert (proxy.requests, second.requests) == (9, 21)
    await asyncio.to_thread(proxy.come_back)
    await asyncio.sleep(1)
    await turns()
    assert (proxy.requests, second.requests) == (9, 27), "a conversation that moved stays where it is"
    for lease in leases:
        pool.release(lease)
    await pool.close()
