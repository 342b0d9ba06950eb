"""The `WeightSync` seam: how the students get the trainer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainers.model import Policy
    from trainers.roster import Listed


class WeightSync(Protocol):
    @property
    def served_as(self) -> str | None:
        """What requests of the newest version name as their model, on rank 0; None: the served model itself."""
        ...

    def push(self, policy: Policy, version: int) -> dict[str, float]:
        """Make the students serve `policy` under `version`; called by every rank.

        Returns catalog metrics on rank 0; other ranks may return none.

        Raises:
            WeightSyncError: on every rank; the students were resumed on whatever weights they hold.
        """
        ...

    def wanting(self) -> bool:
        """Whether `admit` has something to do. Rank 0 asks again and again while it waits for rollouts; does not wait."""
        ...

    def admit(self, policy: Policy, version: int) -> None:
        """Give servers that came since, or were started anew, the `policy` under the `version` that the others hold, and let go
        those that are no longer the run's; called by every rank. Where none is left, one is waited for.

        Raises:
            ServerError: on every rank; none came in time.
        """
        ...

    def news(self) -> Sequence[Listed] | None:
        """The servers that hold the newest policy, on rank 0; None: the same as at the last call."""
        ...

    def close(self) -> None: ...
