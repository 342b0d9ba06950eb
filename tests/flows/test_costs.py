"""The meter of a flow run: GPU seconds by attempt, money, and the limits that stop a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.config import LimitsConfig
from flows.costs import WRITE_S, Meter
from infra import leases as leases_module
from infra.leases import LeaseManager
from infra.registry import Registry


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = Registry(tmp_path / "registry.db")
    yield registry
    registry.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(leases_module, "visible_gpus", lambda: [0, 1, 2, 3])
    return Clock()


@pytest.fixture
def leases(registry: Registry, clock: Clock) -> Iterator[LeaseManager]:
    with LeaseManager(registry, clock=clock) as manager:
        yield manager


def make(registry: Registry, run_id: str, leases: LeaseManager, clock: Clock, **limits: Any) -> Meter:
    busy_s: Callable[[], float] = limits.pop("busy_s", lambda: 0.0)  # of the students
    return Meter(registry, run_id, leases, LimitsConfig(**limits), clock, lambda: {"student": busy_s()})


def by_attempt(registry: Registry, run_id: str) -> dict[tuple[int, str], float]:
    return {(row.attempt, row.kind): row.value for row in registry.list_costs(run_id)}


def test_seconds_count_from_lease_to_release_by_attempt(registry: Registry, leases: LeaseManager, clock: Clock) -> None:
    run = registry.create_run("r", "sft").id
    busy_s = 0.0
    meter = make(registry, run, leases, clock, busy_s=lambda: busy_s, usd_per_gpu_hour=36.0)
    student = leases.lease_gpus(1, run, "student")
    clock.now += 10  # servers start: the first attempt's
    meter.begin_attempt(1)
    leases.lease_gpus(2, run)
    clock.now += 100
    busy_s = 80.0
    meter.write()
    assert registry.costs(run) == pytest.approx(
        {"gpu_s/student": 110, "idle_gpu_s/student": 30, "gpu_s/trainer": 200, "usd": 3.1}
    )
    meter.begin_attempt(2)
    clock.now += 5
    busy_s = 85.0
    leases.release(student)
    leases.release(student)  # released once
    clock.now += 5
    leases.close()
    clock.now += 1000  # nobody holds anything any more
    meter.write()
    assert by_attempt(registry, run) == pytest.approx(
        {
            (1, "gpu_s/student"): 110,
            (1, "idle_gpu_s/student"): 30,
            (1, "gpu_s/trainer"): 200,
            (1, "usd"): 3.1,
            (2, "gpu_s/student"): 5,
            (2, "idle_gpu_s/student"): 0,
            (2, "gpu_s/trainer"): 20,
            (2, "usd"): 0.25,
        }
    )


def test_a_resumed_flow_adds_to_what_was_there(registry: Registry, clock: Clock) -> None:
    run = registry.create_run("r", "sft").id
    for seconds in (7, 8):  # flow runs that never came to an attempt
        with LeaseManager(registry, clock=clock) as leases:
            meter = make(registry, run, leases, clock)
            leases.lease_gpus(1, run)
            clock.now += seconds
        meter.write()
    with LeaseManager(registry, clock=clock) as leases:
        meter = make(registry, run, leases, clock)
        meter.begin_attempt(1)
        leases.lease_gpus(1, run)
        clock.now += 20
    meter.write()
    assert by_attempt(registry, run) == {(0, "gpu_s/trainer"): 15, (1, "gpu_s/trainer"): 20}


def test_without_gpus_nothing_is_written(registry: Registry, leases: LeaseManager, clock: Clock) -> None:
    run = registry.create_run("r", "sft").id
    meter = make(registry, run, leases, clock, usd_per_gpu_hour=36.0)
    meter.begin_attempt(1)
    leases.lease_port(run)
    clock.now += 10
    meter.write()
    assert registry.costs(run) == {}
    assert meter.over_limit() is None


def test_it_writes_once_a_minute_and_survives_a_registry_that_does_not_take_it(
    registry: Registry, leases: LeaseManager, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = registry.create_run("r", "sft").id
    meter = make(registry, run, leases, clock)
    meter.begin_attempt(1)
    leases.lease_gpus(1, run)
    clock.now += WRITE_S - 1
    meter.write_each_minute()
    assert registry.costs(run) == {}
    clock.now += 1
    meter.write_each_minute()
    assert registry.costs(run) == {"gpu_s/trainer": WRITE_S}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "add_costs", lambda *_: (_ for _ in ()).throw(OSError("unreachable")))
        clock.now += WRITE_S
        meter.write_each_minute()
    assert "costs of the run are not written: OSError: unreachable" in caplog.text
    clock.now += WRITE_S
    meter.write_each_minute()
    assert registry.costs(run) == {"gpu_s/trainer": 3 * WRITE_S}


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"gpu_hours": 1.0}, r"limits\.gpu_hours=1 is used up \(1\): raise it and resume"),
        ({"usd": 2.0, "usd_per_gpu_hour": 2.0}, r"limits\.usd=2 is used up \(2\): raise it and resume"),
    ],
)
def test_a_limit_holds_over_all_attempts(
    registry: Registry, leases: LeaseManager, clock: Clock, limits: dict[str, float], told: str
) -> None:
    run = registry.create_run("r", "sft").id
    registry.add_costs(run, 1, {"gpu_s/trainer": 1200, "gpu_s/student": 600, "usd": 1.0})  # an earlier flow run
    meter = make(registry, run, leases, clock, **limits)
    meter.begin_attempt(2)
    leases.lease_gpus(2, run)
    clock.now += 899
    assert meter.over_limit() is None
    clock.now += 1
    with pytest.raises(AssertionError, match=told):
        assert not meter.over_limit(), meter.over_limit()


def test_a_limit_of_money_needs_a_price() -> None:
    with pytest.raises(ValidationError, match=r"usd=5 needs the price of a GPU: set usd_per_gpu_hour"):
        LimitsConfig(usd=5)
