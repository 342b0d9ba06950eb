"""The `WeightSync` seam: how the students get the trainer's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainers.model import Policy


class WeightSync(Protocol):
    def push(self, policy: Policy, version: int) -> dict[str, float]:
        """Make the students serve `policy` under `version`; called by every rank.

        Returns catalog metrics on rank 0; other ranks may return none.

        Raises:
            WeightSyncError: on every rank; the students were resumed on whatever weights they hold.
        """
        ...

    def close(self) -> None: ...
