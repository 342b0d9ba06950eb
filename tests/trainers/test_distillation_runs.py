"""Whole trainings that distil two teachers into a tiny model, on one rank and on two with sharded parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import distil_worker
from tests.support.policies import ONE_RANK
from tests.trainers.test_distributed import launch

WORKER = Path(distil_worker.__file__)


def test_a_student_comes_closer_to_both_its_teachers_and_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    distil_worker.distil(ONE_RANK, tmp_path)
    launch(2, tmp_path, "cpu", WORKER)
    one, two = (json.loads((tmp_path / f"history-{ranks}.json").read_text()) for ranks in (1, 2))
    assert len(one) == len(two) == distil_worker.STEPS
    for name in ("jsd", "teacher_jsd/a", "teacher_jsd/b"):
        values = [step[name] for step in one]
        assert sum(values[-5:]) < 0.7 * sum(values[:5]), (name, values)
        # Adam divides rounding in near-zero gradients by themselves, so weights drift apart.
        assert values == pytest.approx([step[name] for step in two], abs=1e-3), name
    for ours, theirs in zip(one, two, strict=True):
        shares = [ours[f"teacher_token_frac/{name}"] for name in "ab"]
        assert sum(shares) == pytest.approx(1) and 0.2 < shares[0] < 0.5
        assert shares == [theirs[f"teacher_token_frac/{name}"] for name in "ab"]
        assert ours["teacher_entropy"] == pytest.approx(theirs["teacher_entropy"], abs=1e-5)
        blend = sum(share * ours[f"teacher_jsd/{name}"] for share, name in zip(shares, "ab", strict=True))
        assert ours["jsd"] == pytest.approx(blend, abs=1e-5)
        # Balanced, the loss is the mean of the teachers' own means.
        assert ours["loss"] == pytest.approx((ours["teacher_jsd/a"] + ours["teacher_jsd/b"]) / 2, abs=1e-5)
