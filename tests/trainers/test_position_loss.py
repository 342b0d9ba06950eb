"""Loss by position: buckets that double, sums with counts, exact over rows and steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.policies import ONE_RANK
from trainers.algorithms import LossOutput
from trainers.batch import PackedBatch
from trainers.metrics import MetricBag
from trainers.packing import pack_row
from trainers.position_loss import buckets, loss_by_position
from trainers.types import Sample
from trainers.window import MetricWindow, metric_names


def sample(length: int, trained: list[int]) -> Sample:
    mask = np.isin(np.arange(length), trained)
    zeros = np.zeros(length, np.float32)
    return Sample("0:0", np.arange(length, dtype=np.int32), mask, zeros, 0.0, 0, np.where(mask, 0, -1).astype(np.int32))


@pytest.mark.parametrize("max_length", [2, 3, 1024, 1025, 1_000_000])
def test_every_position_has_one_bucket(max_length):
    firsts = buckets(max_length)
    for position in {1, max_length - 1, *(p for first in firsts for p in (first, min(2 * first - 1, max_length - 1)))}:
        found = loss_by_position(torch.ones(1), torch.tensor([position]), max_length)
        (name,) = [name for name, (_, count) in found.items() if count]
        first = int(name.rpartition("/")[2])
        assert first <= position < 2 * first and first in firsts
    assert len(found) == len(firsts)


def test_sums_over_rows_and_steps_are_those_of_all_tokens():
    rng = np.random.default_rng(0)
    positions, nll = rng.integers(1, 500, 300), rng.random(300)
    window = MetricWindow(metric_names(LossOutput([], loss_by_position(torch.empty(0), None, 500))), ONE_RANK)
    bag = MetricBag()
    for part in np.array_split(np.arange(300), 7):
        window.add(dict(loss_by_position(torch.tensor(nll[part]), torch.tensor(positions[part]), 500)))
        if len(part) == 42:
            bag.merge(window.reduce())
    bag.merge(window.reduce())
    expected = {}
    for first in buckets(500):
        inside = (positions >= first) & (positions < 2 * first)
        if inside.any():
            expected[f"loss_by_position/{first}"] = nll[inside].mean()
    assert bag.values() == pytest.approx(expected)


def test_positions_of_a_packed_row_are_those_of_each_sequence():
    row = pack_row([sample(5, [1, 4]), sample(3, [2])])
    assert PackedBatch.from_row(row, ONE_RANK.device).target_positions.tolist() == [1, 4, 2]


def test_no_tokens_name_every_bucket_and_add_nothing():
    found = loss_by_position(torch.empty(0), None, 9)
    assert list(found) == [f"loss_by_position/{first}" for first in (1, 2, 4, 8)]
    assert all(not pair[0] and not pair[1] for pair in found.values())
