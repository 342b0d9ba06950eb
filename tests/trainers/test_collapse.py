"""The rule by which a falling reward ends a run."""

from __future__ import annotations

import pytest

from trainers.collapse import collapsed
from trainers.config_parts import CollapseConfig
from trainers.errors import DivergenceError

RULE = CollapseConfig(above=0.5, below=0.1, steps=3)


def history(*rewards: float | None, every: int = 1) -> list[dict[str, float]]:
    return [
        {"step": every * number, **({} if reward is None else {"reward": reward})}
        for number, reward in enumerate(rewards, start=1)
    ]


@pytest.mark.parametrize(
    ("entries", "ends"),
    [
        (history(0.0, 0.0, 0.0, 0.0, 0.0), False),  # it never could
        (history(0.2, 0.6, 0.05, 0.05), False),  # two steps only
        (history(0.2, 0.6, 0.05, 0.05, 0.05), True),
        (history(0.6, 0.05, 0.05, 0.2, 0.05), False),  # it came back
        (history(0.6, 0.05, None, 0.05, 0.05), True),  # a log without a reward is none of its steps
        (history(0.6, 0.05, every=3), True),  # three steps lie between two logs
        ([], False),
    ],
)
def test_collapse(entries: list[dict[str, float]], ends: bool) -> None:
    assert (collapsed(entries, RULE) is not None) is ends


def test_the_cause_has_the_numbers() -> None:
    why = collapsed(history(0.2, 0.6, 0.05, 0.05, 0.05), RULE)
    assert why is not None and why.startswith(
        "the mean reward has been below 0.1 for 3 steps, since step 3; it was 0.6 at step 2"
    )
    assert DivergenceError(why).failure_class == "divergence"


def test_a_rule_that_could_never_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"below=0\.6 is more than above=0\.5"):
        CollapseConfig(above=0.5, below=0.6)
