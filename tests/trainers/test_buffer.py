"""The buffer file: every field of a sample comes back, also those only some samples have."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.errors import ConfigError
from trainers.rollouts.buffer import buffer_arrays, read_buffer, write_buffer
from trainers.types import Sample


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=0, max_size=5)), True])
    trained = int(mask.sum())
    versions = np.where(mask, draw(st.integers(0, 9)) + np.arange(len(mask)), -1).astype(np.int32)
    sample = Sample(
        group=f"{draw(st.integers(0, 3))}:{draw(st.integers(0, 99))}",
        token_ids=np.arange(len(mask), dtype=np.int32) + draw(st.integers(0, 99)),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        advantage=draw(st.floats(-3, 3)),
        version_min=int(versions[mask].min()),
        versions=versions,
        metrics=draw(st.sampled_from([{}, {"turns": 2.0}])),
    )
    if draw(st.booleans()):
        width = draw(st.integers(0, 3))
        sample.top_ids = np.arange(trained * width, dtype=np.int32).reshape(trained, width)
        sample.top_logprobs = -np.ones((trained, width), np.float32)
    if draw(st.booleans()):
        sample.candidate_counts = np.array(draw(st.lists(st.integers(0, 2), min_size=trained, max_size=trained)), np.int32)
        sample.candidate_ids = np.arange(sample.candidate_counts.sum(), dtype=np.int32)
    if draw(st.booleans()):
        sample.teacher, sample.teacher_logprobs = draw(st.sampled_from(["math", "code"])), -np.ones(trained, np.float32)
    return sample


@given(st.lists(samples(), max_size=5))
def test_every_field_comes_back(tmp_path_factory: pytest.TempPathFactory, given_samples: list[Sample]) -> None:
    file = tmp_path_factory.mktemp("buffer") / "rollout_buffer.npz"
    write_buffer(file, buffer_arrays(given_samples))
    back = read_buffer(file)
    assert len(back) == len(given_samples)
    for sample, same in zip(given_samples, back, strict=True):
        assert same.nbytes == sample.nbytes
        for field in dataclasses.fields(Sample):
            expected: Any = getattr(sample, field.name)
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(getattr(same, field.name), expected, strict=True)
            else:
                assert getattr(same, field.name) == expected, field.name


def test_a_buffer_from_before_there_were_teachers_is_read(tmp_path: Path) -> None:
    mask = np.array([False, True])
    plain = Sample("0:1", np.array([3, 4], np.int32), mask, np.zeros(2, np.float32), 1.0, 2, np.array([-1, 2], np.int32))
    arrays = buffer_arrays([plain])
    assert not [name for name in arrays if name.startswith("teacher")], "what an earlier version writes"
    write_buffer(tmp_path / "rollout_buffer.npz", arrays)
    (sample,) = read_buffer(tmp_path / "rollout_buffer.npz")
    assert sample.teacher is None and sample.teacher_logprobs is None and sample.token_ids.tolist() == [3, 4]


def test_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rollout_buffer.npz"
    write_buffer(file, {name: array for name, array in buffer_arrays([]).items() if name != "format"})
    with pytest.raises(ConfigError, match=r"rollout_buffer\.npz has format 1, and this version reads format 2"):
        read_buffer(file)
