"""The planner's invariants, as property tests."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from trainers.planner import StepPlanner, attention_cost


def fill(planner: StepPlanner, lengths: list[int]) -> int:
    """Samples placed before the step was full."""
    for count, length in enumerate(lengths):
        if planner.full or not planner.add(length):
            return count
    return len(lengths)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    microbatches=st.integers(1, 3),
    world_size=st.integers(1, 4),
    budget=st.integers(40, 120),
)
def test_budget_rows(lengths: list[int], microbatches: int, world_size: int, budget: int) -> None:
    planner = StepPlanner(microbatches, world_size, budget, row_samples=1)
    placed = fill(planner, lengths)
    rows = planner.plan().rows
    assert len(rows) == microbatches and all(len(microbatch) == world_size for microbatch in rows)
    assert sorted(i for microbatch in rows for row in microbatch for i in row) == list(range(placed))
    for microbatch in rows:
        assert all(sum(lengths[i] for i in row) <= budget for row in microbatch)
        assert all(row == sorted(row) for row in microbatch)
        loads = [sum(attention_cost(lengths[i]) for i in row) for row in microbatch]
        largest = max((attention_cost(lengths[i]) for row in microbatch for i in row), default=0)
        assert max(loads) - min(loads) <= largest
    # Micro-batches are filled one after the other.
    firsts = [min((i for row in microbatch for i in row), default=placed) for microbatch in rows]
    assert firsts == sorted(firsts)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    microbatches=st.integers(1, 3),
    world_size=st.integers(1, 4),
    width=st.integers(1, 4),
)
def test_rows_of_a_fixed_count(lengths: list[int], microbatches: int, world_size: int, width: int) -> None:
    planner = StepPlanner(microbatches, world_size, None, row_samples=width)
    placed = fill(planner, lengths)
    capacity = microbatches * world_size * width
    assert placed == min(len(lengths), capacity) and planner.full == (placed == capacity)
    rows = planner.plan().rows
    assert sorted(i for microbatch in rows for row in microbatch for i in row) == list(range(placed))
    assert all(len(row) <= width for microbatch in rows for row in microbatch)


def test_a_heavy_sample_goes_to_the_lightest_row() -> None:
    planner = StepPlanner(1, 2, 100, 1)
    for length in (50, 10, 10, 30):
        assert planner.add(length)
    assert planner.plan().rows == [[[0], [1, 2, 3]]]


def test_nothing_placed_gives_empty_rows() -> None:
    assert StepPlanner(2, 2, 100, 1).plan().rows == [[[], []], [[], []]]


def test_planner_and_packing_import_no_torch() -> None:
    code = "import sys, trainers.planner, trainers.packing, trainers.rollouts.engine; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
