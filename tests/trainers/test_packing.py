"""Packed rows against a per-token construction, and the wire format."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainers.packing import pack_row, pack_step, step_from_wire, step_to_wire
from trainers.types import PackedRow, Sample, StepPlan


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 8))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))], bool)
    return Sample(
        group=f"0:{draw(st.integers(0, 3))}",
        token_ids=np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -np.arange(length, dtype=np.float32), np.float32(0)),
        advantage=draw(st.sampled_from([-1.0, 0.5])),
        version_min=0,
        version_max=0,
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


@given(st.lists(samples(), max_size=5))
def test_a_row_is_its_samples_end_to_end(row_samples: list[Sample]) -> None:
    ids, positions, starts, terms = [], [], [0], []
    for number, sample in enumerate(row_samples):
        for place in range(len(sample.token_ids)):
            if sample.loss_mask[place]:
                where = starts[-1] + place - 1
                terms.append((where, sample.token_ids[place], sample.sampler_logprobs[place], sample.advantage, number))
            ids.append(sample.token_ids[place])
            positions.append(place)
        starts.append(starts[-1] + len(sample.token_ids))
    row = pack_row(row_samples)
    assert row.input_ids.tolist() == ids and row.position_ids.tolist() == positions and row.cu_seqlens.tolist() == starts
    got = zip(row.token_index, row.targets, row.sampler_logprobs, row.advantages, row.sequence_index, strict=True)
    assert list(got) == terms
    assert [getattr(row, name).dtype for name in PackedRow.FIELDS] == [np.int32] * 5 + [np.float32] * 2 + [np.int32]


@given(st.lists(samples(), min_size=1, max_size=6), st.integers(1, 2), st.integers(1, 3))
def test_a_step_survives_the_wire(step_samples: list[Sample], microbatches: int, world_size: int) -> None:
    rows: list[list[list[int]]] = [[[] for _ in range(world_size)] for _ in range(microbatches)]
    for i in range(len(step_samples)):
        rows[i % microbatches][i % world_size].append(i)
    step = pack_step(3, StepPlan(rows), step_samples, {"batch/samples_per_step": (len(step_samples), 1.0)})
    assert step.totals.tokens == sum(len(row.targets) for batch in step.rows for row in batch)
    assert step.totals.groups == len({sample.group for sample in step_samples})
    back = step_from_wire(*step_to_wire(step))
    assert (back.index, back.totals, back.metrics) == (step.index, step.totals, step.metrics)
    assert [len(batch) for batch in back.rows] == [world_size] * microbatches
    for batch, other in zip(step.rows, back.rows, strict=True):
        for row, same in zip(batch, other, strict=True):
            for name in PackedRow.FIELDS:
                np.testing.assert_array_equal(getattr(row, name), getattr(same, name), strict=True)
