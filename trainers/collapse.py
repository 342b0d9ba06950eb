"""Reward collapse by rule: a policy that could do the task and no longer can is not trained on.

The rule looks at the logged values of `reward`, which a checkpoint holds, so that a resumed run judges as one that was never
stopped would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.config_parts import CollapseConfig


def collapsed(history: Sequence[Mapping[str, Any]], rule: CollapseConfig) -> str | None:
    """What happened, if the reward was once at least `rule.above` and has now been under `rule.below` for `rule.steps` steps.

    Args:
        history: `TrainerState.log_history`, by step; entries without `reward` do not count.
    """
    rewards = [(int(entry["step"]), float(entry["reward"])) for entry in history if "reward" in entry]
    best = max(rewards, key=lambda entry: entry[1], default=None)
    if best is None or best[1] < rule.above:
        return None
    last_good = max(step for step, reward in rewards if reward >= rule.below)
    low = rewards[-1][0] - last_good
    if low < rule.steps:
        return None
    return (
        f"the mean reward has been below {rule.below:g} for {low} steps, since step {last_good + 1}; it was {best[1]:.4g} at "
        f"step {best[0]} (reward_collapse): the run stops here, its checkpoints stay"
    )
