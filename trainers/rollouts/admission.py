"""When the next prompt may be generated: a pure function of counts, so that nothing can be lost in it.

Capacity is never reserved and given back; it is recomputed from what is there now. A dropped group therefore frees its share by
not being there any more, and no sequence of drops can use it up.

Nothing can be held for ever: the trainer waits only while the queue is used up, and a group is then admitted whatever its size
as soon as none is on its way. Samples that fill the queue are planned when the trainer asks next, which frees their room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["admit", "hold_version", "hold_full", "hold_end"]


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision rests on. Versions are policy versions; counts are samples, a rollout in flight counting as one."""

    version: int | None  # what the servers hold; None: nothing known yet
    next_version: int  # at which the next step to be planned trains
    next_index: int  # of that step
    max_steps: int | None
    waiting: bool  # the trainer waits for that step, and the queue is used up
    planned: int  # samples already placed in the step that is being planned
    queued: int
    outstanding: int  # rollouts generating or in scoring
    samples_per_step: float  # estimate
    weight_sync_steps: int
    max_staleness: int
    queue_maxsize: int
    queued_bytes: int
    queue_max_bytes: int


def decide(now: Situation, rollouts: int) -> Verdict:
    """Whether a group of `rollouts` may start.

    It is admitted if the queue has room for it and if it would train, as far as can be told, while it is fresh and before the
    run ends. When the trainer waits and nothing is on its way, estimates do not matter: something must be admitted.
    """
    if now.version is None or now.next_version - now.version > now.max_staleness:
        return "hold_version"  # what started now would be stale already
    if now.max_steps is not None and now.next_index > now.max_steps:
        return "hold_end"
    if now.waiting and now.outstanding == 0:
        return "admit"
    if now.queued_bytes >= now.queue_max_bytes:
        return "hold_full"
    present = now.planned + now.queued + now.outstanding
    if now.queued + now.outstanding + rollouts > now.queue_maxsize:
        return "hold_full"
    # A step that is still short holds more samples than are placed in it.
    per_step = max(1.0, now.samples_per_step, now.planned + 1.0 if now.waiting else 0.0)
    steps_ahead = int((present + rollouts - 1) / per_step)  # of the group's last sample
    if now.max_steps is not None and now.next_index + steps_ahead > now.max_steps:
        return "hold_end"
    # The trainer syncs after every step whose index is a multiple of `weight_sync_steps`.
    before = now.next_index - 1
    syncs = (before + steps_ahead) // now.weight_sync_steps - before // now.weight_sync_steps
    if now.next_version + syncs - now.version > now.max_staleness:
        return "hold_full"
    return "admit"
