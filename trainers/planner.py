"""Which sample goes into which row of an optimizer step. Pure Python and NumPy.

A step is `microbatches` × `world_size` rows. Samples are placed one at a time, in queue order:

    sample ─▶ least-loaded row of the open micro-batch in which it fits ─▶ no such row: next micro-batch ─▶ none left: full

Invariants (the property tests):
- every sample offered and placed is in exactly one row; order within a row is queue order;
- a row's tokens never exceed `token_budget`, its samples never `row_samples` (one of the two is set);
- under a token budget, the loads within one micro-batch differ by at most the cost of its largest sample;
- every step has exactly `microbatches` × `world_size` rows; those that got nothing are empty;
- planning depends on the lengths and their order alone.

Load is attention cost: a sample of L tokens attends to L(L+1)/2 positions.
"""

from __future__ import annotations

from trainers.types import StepPlan


def attention_cost(length: int) -> int:
    """Positions attended to by a causal sequence of `length` tokens."""
    return length * (length + 1) // 2


class StepPlanner:
    """Plans one step incrementally.

    Args:
        microbatches: gradient_accumulation_steps.
        world_size: rows per micro-batch.
        token_budget: most tokens in a row, or None for rows of `row_samples` samples.
        row_samples: most samples in a row; used when `token_budget` is None.
    """

    def __init__(self, microbatches: int, world_size: int, token_budget: int | None, row_samples: int) -> None:
        assert microbatches >= 1 and world_size >= 1, (microbatches, world_size)
        self.token_budget = token_budget
        self.row_samples = row_samples
        self.count = 0
        self._microbatches = microbatches
        self._world_size = world_size
        self._rows: list[list[list[int]]] = []
        self._open_microbatch()

    def _open_microbatch(self) -> None:
        self._rows.append([[] for _ in range(self._world_size)])
        self._tokens = [0] * self._world_size
        self._loads = [0] * self._world_size
        self._largest = 0

    def oversize(self, length: int) -> bool:
        """Whether no row could ever hold a sample of this length."""
        return self.token_budget is not None and length > self.token_budget

    @property
    def full(self) -> bool:
        """Known to be full without another sample; only rows of a fixed sample count can tell."""
        return (
            self.token_budget is None
            and len(self._rows) == self._microbatches
            and all(len(row) == self.row_samples for row in self._rows[-1])
        )

    def add(self, length: int) -> bool:
        """Place the next sample. False: the step is full, and the sample belongs to the next one."""
        assert length >= 1 and not self.oversize(length), (length, self.token_budget)
        rank = self._place(length)
        if rank is None and len(self._rows) < self._microbatches:
            self._open_microbatch()
            rank = self._place(length)
        if rank is None:
            return False
        cost = attention_cost(length)
        self._rows[-1][rank].append(self.count)
        self._tokens[rank] += length
        self._loads[rank] += cost
        self._largest = max(self._largest, cost)
        self.count += 1
        return True

    def _place(self, length: int) -> int | None:
        cost = attention_cost(length)
        for rank in sorted(range(self._world_size), key=lambda rank: (self._loads[rank], rank)):
            if self.token_budget is None:
                if len(self._rows[-1][rank]) < self.row_samples:
                    return rank
            elif self._tokens[rank] + length <= self.token_budget:
                # A fuller row is only taken while the micro-batch stays balanced.
                spread = self._loads[rank] + cost - min(self._loads)
                return rank if spread <= max(self._largest, cost) else None
        return None

    def plan(self) -> StepPlan:
        """The step as planned so far, filled up with empty rows. Indices count the samples in the order they were added."""
        missing = self._microbatches - len(self._rows)
        return StepPlan(rows=self._rows + [[[] for _ in range(self._world_size)] for _ in range(missing)])
