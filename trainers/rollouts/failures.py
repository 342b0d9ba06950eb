"""When too many rollouts fail, the run ends and says why."""

from __future__ import annotations

from collections import Counter, deque

from trainers.errors import RolloutFailures, came_from

WINDOW = 256
LEAST = 32


class FailureWindow:
    """The newest `WINDOW` rollouts: how many failed, and of what.

    Args:
        limit: highest share of failed rollouts that is tolerated; judged once `LEAST` rollouts have ended, and at the end.
        of, field: for the message: which rollouts, and the config's field that sets the limit.
    """

    def __init__(self, limit: float, of: str = "rollouts", field: str = "max_rollout_failure_frac") -> None:
        self._limit, self._of, self._field = limit, of, field
        self._causes: deque[str | None] = deque(maxlen=WINDOW)
        self._examples: dict[str, str] = {}
        self._tracebacks: dict[str, str] = {}

    def add(self, cause: str | None, message: str = "", traceback: str | None = None) -> None:
        """One rollout ended; `cause` None: it did not fail. `traceback`: of the user's code, if that failed."""
        self._causes.append(cause)
        if cause is not None:
            self._examples[cause] = message
            if traceback is not None:
                self._tracebacks[cause] = traceback

    def check(self, final: bool = False) -> None:
        """Raises `RolloutFailures` if the window holds too many failures."""
        failed = Counter(cause for cause in self._causes if cause is not None)
        count = failed.total()
        if not count or (len(self._causes) < LEAST and not final) or count <= self._limit * len(self._causes):
            return
        causes = "; ".join(f"{number} × {cause}: {self._examples[cause]}" for cause, number in failed.most_common())
        error = RolloutFailures(
            f"{count} of the last {len(self._causes)} {self._of} failed ({self._field} = {self._limit:g}): {causes}"
        )
        told = [self._tracebacks[cause] for cause, _ in failed.most_common() if cause in self._tracebacks]
        raise came_from(error, told[0]) if told else error
