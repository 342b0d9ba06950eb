"""Which checkpoints may go: one rule for the run's folder and for shared storage. Pure; no torch.

    kept = the newest · the last n · the best n by a metric · every k-th step · those with a pin · everything, if n is not set

Invariants: the newest checkpoint never goes; a pinned one never goes; steps beyond the newest belong to a timeline that was
given up (the run fell back behind them), so they count as older than all others and are neither best nor a k-th.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


class Kept(Protocol):
    """What the rule looks at of one checkpoint."""

    @property
    def pinned(self) -> bool: ...
    @property
    def metrics(self) -> Mapping[str, float]:
        """What its manifest says was measured at its step."""
        ...


@dataclass(frozen=True, slots=True)
class Retention:
    """`last` None: nothing ever goes. `best`: how many, by `metric`, of those that have it."""

    last: int | None = None
    best: int = 0
    metric: str = "eval/accuracy"
    mode: Literal["max", "min"] = "max"
    every: int | None = None

    def removable(self, checkpoints: Mapping[int, Kept], newest: int) -> set[int]:
        """Steps that may be deleted, given that `newest`, the one just written, is whole."""
        if not self.last:
            return set()
        timeline = sorted((step for step in checkpoints if step <= newest), reverse=True)
        given_up = sorted((step for step in checkpoints if step > newest), reverse=True)
        kept = {newest, *[*timeline, *given_up][: self.last]}
        kept |= {step for step, checkpoint in checkpoints.items() if checkpoint.pinned}
        if self.every:
            kept |= {step for step in timeline if step % self.every == 0}
        scored = [step for step in timeline if self.metric in checkpoints[step].metrics]
        sign = 1 if self.mode == "max" else -1
        # Of equals the newer one counts.
        scored.sort(key=lambda step: (sign * checkpoints[step].metrics[self.metric], step), reverse=True)
        kept |= set(scored[: self.best])
        return set(checkpoints) - kept
