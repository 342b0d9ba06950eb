"""What the trainer tells the registry of a run, and what it is told back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainers.metrics import CATALOG, spec_of
from trainers.run_sink import CostLog


class Writer:
    """A registry writer at once, with costs as rows by (attempt, kind)."""

    run_id = "r"

    def __init__(self, **by_flow: float) -> None:
        self.rows = {(1, kind.replace("__", "/")): value for kind, value in by_flow.items()}
        self.registry = SimpleNamespace(add_costs=self._add, costs=self._costs)

    def submit(self, work: Any) -> None:
        work()

    def _add(self, run_id: str, attempt: int, values: dict[str, float]) -> None:
        self.rows |= {(attempt, kind): value for kind, value in values.items()}

    def _costs(self, run_id: str) -> dict[str, float]:
        return {kind: value for (_, kind), value in self.rows.items()}


def test_what_the_trainer_counts_goes_to_the_registry_and_what_the_flow_counts_comes_back() -> None:
    writer = Writer(gpu_s__student=100.0, gpu_s__trainer=50.0, idle_gpu_s__student=30.0, idle_gpu_s__teacher=5.0, usd=2.0)
    costs = CostLog(writer)
    step = {"loss": 1.0, "cost/tokens/trained": 640.0, "cost/tokens/generated": 700.0, "cost/idle_gpu_s/trainer": 12.0}
    told = costs.known(step)
    assert told == {
        "cost/gpu_s/student": 100.0,
        "cost/gpu_s/trainer": 50.0,
        "cost/idle_gpu_s/student": 30.0,
        "cost/idle_gpu_s/teacher": 5.0,
        "cost/usd": 2.0,
    }
    assert {kind: value for (attempt, kind), value in writer.rows.items() if attempt == 0} == {
        "tokens/trained": 640.0,
        "tokens/generated": 700.0,
        "idle_gpu_s/trainer": 12.0,
    }
    recorded = {spec_of(name).name for name in [*told, *(name for name in step if name.startswith("cost/"))]}
    assert recorded == {name for name in CATALOG if name.startswith("cost/")} - {"cost/tokens/dropped"}


def test_the_registry_is_asked_now_and_then_only_and_at_the_end_gets_the_newest() -> None:
    writer = Writer(usd=2.0)
    costs = CostLog(writer)
    costs.known({"cost/tokens/trained": 1.0})
    assert costs.known({"cost/tokens/trained": 2.0}) == {"cost/usd": 2.0}
    assert writer.rows[0, "tokens/trained"] == 1.0
    costs.exchange()
    assert writer.rows[0, "tokens/trained"] == 2.0
