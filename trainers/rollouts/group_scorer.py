"""What stands between generation and credit: scores the rollouts of a group. Rewards (`scoring`) or teachers (`teachers`).

    generated group ─▶ score ─▶ rollouts with rewards, or with a teacher's log-probabilities, or failed

The loop knows nothing else of an objective's scoring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from trainers.types import RolloutGroup


class GroupScorer(ABC):
    """Scores groups in place, beside generation: a slow one never stops it.

    Attributes:
        pending: groups waiting for or in scoring.
        judges: causes of failure that `check` judges, so that they do not count among the run's failed rollouts.
    """

    pending: int = 0
    judges: frozenset[str] = frozenset()

    async def open(self, student_max_model_len: int) -> None:  # noqa: B027 - rewards need nothing
        """Runs once, before the first prompt. `student_max_model_len`: the longest sequence that will come, in tokens.

        Raises:
            ServerError, ConfigError: what scores cannot be reached, or cannot score this run's rollouts.
        """

    @abstractmethod
    async def score(self, group: RolloutGroup) -> None:
        """Score every rollout of the group, or set its `failed`."""

    def check(self, final: bool = False) -> None:  # noqa: B027
        """Raises `RolloutFailures` if too much of what it `judges` failed. `final`: nothing more will come."""

    @abstractmethod
    def describe(self) -> str:
        """What groups wait for, while `pending`."""

    @abstractmethod
    async def close(self) -> None: ...
