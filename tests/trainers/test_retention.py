"""Which checkpoints may go."""

from __future__ import annotations

import random

import pytest

from trainers.checkpoint import Found
from trainers.retention import Retention


def found(*steps: int, pinned: tuple[int, ...] = (), **metrics: float) -> dict[int, Found]:
    """`metrics`: s5=0.3 is the accuracy of step 5."""
    return {
        step: Found(step in pinned, {"eval/accuracy": metrics[f"s{step}"]} if f"s{step}" in metrics else {}) for step in steps
    }


@pytest.mark.parametrize(
    ("rule", "there", "newest", "gone"),
    [
        (Retention(None), found(1, 2, 3), 3, set()),
        (Retention(1), found(1, 2, 3), 3, {1, 2}),
        (Retention(2), found(1, 2, 3, pinned=(1,)), 3, set()),
        (Retention(1, every=2), found(1, 2, 3, 4, 5), 5, {1, 3}),
        (Retention(1, best=1), found(1, 2, 3, s1=0.2, s2=0.9, s3=0.1), 3, {1}),
        (Retention(1, best=1, mode="min"), found(1, 2, 3, s1=0.2, s2=0.9, s3=0.1), 3, {1, 2}),
        (Retention(1, best=1), found(1, 2, 3, s1=0.5, s2=0.5), 3, {1}),
        (Retention(1, best=2, metric="reward"), found(1, 2, 3, s1=0.5), 3, {1, 2}),
        # Steps beyond the newest are of a timeline that was given up: they go first, and do not push out what is good.
        (Retention(1), found(3, 4, 6), 4, {3, 6}),
        (Retention(2), found(3, 4, 6), 4, {6}),
        (Retention(1, every=3, best=1), found(3, 4, 6, s6=1.0), 4, {6}),
    ],
)
def test_what_goes(rule, there, newest, gone):
    assert rule.removable(there, newest) == gone


def test_the_newest_and_pinned_ones_stay_whatever_the_rule_and_the_last_n_too():
    draw = random.Random(0)
    for _ in range(300):
        steps = draw.sample(range(1, 40), draw.randint(1, 12))
        there = {
            step: Found(draw.random() < 0.2, {"eval/accuracy": draw.random()} if draw.random() < 0.5 else {}) for step in steps
        }
        newest = draw.choice(steps)
        rule = Retention(draw.randint(1, 4), draw.randint(0, 3), every=draw.choice([None, 5]))
        gone = rule.removable(there, newest)
        assert newest not in gone and not any(there[step].pinned for step in gone)
        timeline = sorted(step for step in steps if step <= newest)
        assert not gone & set(timeline[-rule.last :]), "the last n"
        left = {step: entry for step, entry in there.items() if step not in gone}
        assert rule.removable(left, newest) == set(), "what is left stays"
