"""How each rank comes by its rows of a step.

    all ranks on one node: every rank ─▶ RowClient ─▶ the rollout process        else: rank 0 ─▶ source ─▶ scatter

Rows are numbered by data-parallel place: ranks that share their rows (cp, sp) fetch the same.

A rank that cannot fetch fails the step on every rank, and none waits for it: the ranks agree before they use what they got.
"""

from __future__ import annotations

from trainers.distributed import Ranks
from trainers.errors import LoopwrightError
from trainers.rollouts.rows import RowClient
from trainers.step_source import StepSource
from trainers.types import PackedRow


class RankRows:
    """This rank's way to its rows. `open`, `fetch` are called by all ranks together.

    Args:
        source: rank 0's.
        timeout_s: longest silence while rows are fetched.
    """

    def __init__(self, ranks: Ranks, source: StepSource | None, timeout_s: float) -> None:
        self._ranks, self._source, self._timeout_s = ranks, source, timeout_s
        self._client: RowClient | None = None
        self._own = ranks.world_size == 1  # whether every rank fetches its own

    def open(self) -> None:
        """Connect to the source, which has started."""
        if self._ranks.world_size == 1:
            return
        address = self._ranks.rank_zero(lambda: self._from_source().rows_address)
        # What rank 0 sees of its own node says nothing of the others'.
        self._own = address is not None and not self._ranks.any(not self._ranks.one_node)[0]
        if not self._own:
            return
        failure: LoopwrightError | None = None
        if not self._ranks.is_main:
            assert address is not None
            try:
                self._client = RowClient(address, self._timeout_s)
            except LoopwrightError as error:
                failure = error
        self._ranks.agree(failure)

    def fetch(self, index: int) -> list[PackedRow]:
        """This rank's rows of step `index`, one per micro-batch.

        Raises:
            RolloutError: on every rank, if any could not fetch; where the process died, rank 0 says how.
        """
        if not self._own:
            places = range(self._ranks.dp_size)
            # Not sent with what rank 0 says of the step: each rank would get the rows of all.
            parts: list[list[PackedRow]] = []
            self._ranks.rank_zero(lambda: parts.extend(self._from_source().fetch(index, place) for place in places))
            return self._ranks.scatter([part for part in parts for _ in range(self._ranks.place_size)])
        rows: list[PackedRow] = []
        failure: LoopwrightError | None = None
        try:
            rows = self._fetch(index)
        except LoopwrightError as error:
            failure = error
        if self._ranks.any(failure is not None)[0]:
            self._ranks.rank_zero(lambda: self._from_source().check())
            self._ranks.agree(failure)
        return rows

    def _fetch(self, index: int) -> list[PackedRow]:
        if self._client is not None:
            return self._client.fetch(index, self._ranks.dp_rank)
        return self._from_source().fetch(index, 0)

    def _from_source(self) -> StepSource:
        assert self._source is not None, "only rank 0 has a step source"
        return self._source

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
