"""Packed rows against a per-token construction, and the wire format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainers.packing import head_from_wire, head_to_wire, pack_row, pack_step, rows_from_wire, rows_to_wire
from trainers.rollouts.channel import Message, decode, encode
from trainers.types import PackedRow, Sample, StepPlan


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 8))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))], bool)
    trained = int(mask.sum())
    sampler: dict[str, Any] = {}
    if width := draw(st.integers(0, 3)):
        sampler["top_ids"] = np.arange(trained * width, dtype=np.int32).reshape(trained, width)
        sampler["top_logprobs"] = -sampler["top_ids"].astype(np.float32)
    if draw(st.booleans()):
        counts = draw(st.lists(st.integers(0, 4), min_size=trained, max_size=trained))
        sampler["candidate_counts"] = np.array(counts, np.int32)
        sampler["candidate_ids"] = np.arange(sum(counts), dtype=np.int32)
    if draw(st.booleans()):
        sampler |= {"teacher": draw(st.sampled_from("ab")), "teacher_logprobs": -np.ones(trained, np.float32)}
    return Sample(
        group=f"0:{draw(st.integers(0, 3))}",
        token_ids=np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -np.arange(length, dtype=np.float32), np.float32(0)),
        advantage=draw(st.sampled_from([-1.0, 0.5])),
        version_min=0,
        versions=np.where(mask, 0, -1).astype(np.int32),
        **sampler,
    )


def sampler_terms(sample: Sample, width: int) -> list[tuple[list[int], list[float], list[int]]]:
    """Per trained token: top ids and logprobs filled up to `width`, candidates."""
    ids = [[]] * sample.trained_tokens if sample.top_ids is None else sample.top_ids.tolist()
    logprobs = [[]] * sample.trained_tokens if sample.top_logprobs is None else sample.top_logprobs.tolist()
    left = [] if sample.candidate_ids is None else sample.candidate_ids.tolist()
    counts = [0] * sample.trained_tokens if sample.candidate_counts is None else sample.candidate_counts.tolist()
    terms = []
    for i, count in enumerate(counts):
        fill = width - len(ids[i])
        terms.append((ids[i] + [-1] * fill, logprobs[i] + [-np.inf] * fill, left[:count]))
        left = left[count:]
    return terms


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
    row = pack_row(row_samples, teachers=("b", "a"))
    assert row.input_ids.tolist() == ids and row.position_ids.tolist() == positions and row.cu_seqlens.tolist() == starts
    got = zip(row.token_index, row.targets, row.sampler_logprobs, row.advantages, row.sequence_index, strict=True)
    assert list(got) == terms
    reals = ("sampler_logprobs", "advantages", "top_logprobs", "teacher_logprobs")
    assert all(getattr(row, name).dtype == (np.float32 if name in reals else np.int32) for name in PackedRow.FIELDS)
    said = [(-1.0, "ba".index(s.teacher)) if s.teacher else (0.0, -1) for s in row_samples for _ in range(s.trained_tokens)]
    taught = any(sample.teacher is not None for sample in row_samples)
    assert list(zip(row.teacher_logprobs, row.teacher_index, strict=True)) == (said if taught else [])
    width = row.top_ids.shape[1]
    assert width == max((sample.top_ids.shape[1] for sample in row_samples if sample.top_ids is not None), default=0)
    counts = row.candidate_counts if len(row.candidate_counts) else np.zeros(len(terms), np.int32)
    assert len(row.candidate_counts) in (0, len(terms))
    candidates = np.split(row.candidate_ids, np.cumsum(counts)[:-1]) if len(counts) else []
    sampled = zip(row.top_ids.tolist(), row.top_logprobs.tolist(), [ids.tolist() for ids in candidates], strict=True)
    assert list(sampled) == [term for sample in row_samples for term in sampler_terms(sample, width)]


@given(st.lists(samples(), min_size=1, max_size=6), st.integers(1, 2), st.integers(1, 3))
def test_a_step_and_its_rows_survive_the_wire(step_samples: list[Sample], microbatches: int, world_size: int) -> None:
    rows: list[list[list[int]]] = [[[] for _ in range(world_size)] for _ in range(microbatches)]
    for i in range(len(step_samples)):
        rows[i % microbatches][i % world_size].append(i)
    step = pack_step(3, StepPlan(rows), step_samples, {"batch/samples_per_step": (len(step_samples), 1.0)}, "ab")
    assert step.totals.tokens == sum(len(row.targets) for batch in step.rows for row in batch)
    assert step.totals.groups == len({sample.group for sample in step_samples})
    assert step.totals.squared_tokens == sum(len(sample.token_ids) ** 2 for sample in step_samples)
    head = head_from_wire(json.loads(json.dumps(head_to_wire(step))))
    assert (head.index, head.totals, head.metrics) == (step.index, step.totals, step.metrics)
    for rank in range(world_size):
        own = [microbatch[rank] for microbatch in step.rows]
        frame = bytearray(b"".join(encode(Message("rows", {}, rows_to_wire(own)))))
        length = int.from_bytes(frame[:4], "little")
        message = decode(json.loads(frame[4 : 4 + length]), frame[4 + length :])
        back = rows_from_wire(message.arrays, microbatches)
        for row, same in zip(own, back, strict=True):
            for name in PackedRow.FIELDS:
                np.testing.assert_array_equal(getattr(row, name), getattr(same, name), strict=True)
                assert getattr(same, name).flags.aligned


@given(st.lists(samples(), min_size=1, max_size=5), st.integers(1, 9))
def test_a_step_lengthens_its_rows_to_a_multiple(step_samples: list[Sample], multiple: int) -> None:
    plan = StepPlan([[list(range(len(step_samples))), []]])
    ((plain, _),) = pack_step(1, plan, step_samples, {}, "ab").rows
    ((padded, empty),) = pack_step(1, plan, step_samples, {}, "ab", multiple).rows
    tokens = len(plain.input_ids)
    assert len(padded.input_ids) % multiple == 0 and 0 <= len(padded.input_ids) - tokens < multiple
    assert len(empty.input_ids) == 0
    assert padded.cu_seqlens.tolist() == [*plain.cu_seqlens[:-1].tolist(), len(padded.input_ids)]
    np.testing.assert_array_equal(padded.input_ids[:tokens], plain.input_ids)
    last = padded.position_ids[padded.cu_seqlens[-2] :]
    np.testing.assert_array_equal(last, np.arange(len(last)))
    for name in PackedRow.FIELDS[3:]:
        np.testing.assert_array_equal(getattr(padded, name), getattr(plain, name))
