"""One row over several ranks: which of its tokens each of them holds, and what is put together again.

    ranks = dp × cp × sp: the cp·sp ranks of one data-parallel place are given the same row

    row [T] ─▶ padded ─▶ of 2·cp chunks, c and 2·cp−1−c ─▶ of these, the s-th of sp slices ─▶ model ─▶ head on own terms
                              (cp rank c)                      (sp rank s)                               │
    loss of the whole row, on every rank ◀─ outputs of all terms, other ranks' as constants ◀────────────┘

Invariants:
- every token and every loss term of a row is on exactly one rank of its place; what is padded comes last and is no term;
- under cp every rank has as much causal attention to compute as any other: an early chunk goes with a late one;
- each rank differentiates the whole row's loss by its own terms alone, so gradients summed over ranks are those of the row;
- the ranks of a place do the same collectives in the same order, whether or not they have terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from trainers.head import HeadOutputs
from trainers.packing import padded, row_multiple
from trainers.types import PackedRow


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's place along one axis. `group` is None where `size` is 1."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """This rank's place among those that share a row.

    Example: `cp.size` 2, `sp.size` 2, 16 tokens: cp rank 0 has the chunks [0, 4) and [12, 16), of which sp rank 0 holds the
    tokens 0 … 3 and sp rank 1 the tokens 12 … 15; cp rank 1 has [4, 12), its ranks 4 … 7 and 8 … 11.
    """

    cp: Axis = field(default_factory=Axis)
    sp: Axis = field(default_factory=Axis)

    @property
    def size(self) -> int:
        """Ranks that share a row."""
        return self.cp.size * self.sp.size

    @property
    def leads(self) -> bool:
        """Whether this is the rank of its place that counts what all of them know."""
        return self.cp.rank == self.sp.rank == 0

    @property
    def multiple(self) -> int:
        """What the tokens of a row are padded to a multiple of."""
        return row_multiple(self.cp.size, self.sp.size)

    def positions(self, tokens: int) -> np.ndarray:
        """int64 [tokens / size]: the row positions of this rank's tokens, in the order in which it holds them."""
        assert tokens % self.multiple == 0, f"{tokens} tokens over {self.cp.size} × {self.sp.size} ranks"
        held = np.arange(tokens, dtype=np.int64)
        if self.cp.size > 1:
            chunks = held.reshape(2 * self.cp.size, -1)
            held = np.concatenate([chunks[self.cp.rank], chunks[2 * self.cp.size - 1 - self.cp.rank]])
        return held.reshape(self.sp.size, -1)[self.sp.rank]

    def part(self, row: PackedRow) -> tuple[PackedRow, np.ndarray]:
        """This rank's tokens and terms of a row, and which of its terms they are (int64 [n]).

        `cu_seqlens` of the part are those of the whole row, padded: attention is over all of it.
        """
        row = padded(row, self.multiple)
        positions = self.positions(len(row.input_ids))
        place = np.full(len(row.input_ids), -1, np.int32)
        place[positions] = np.arange(len(positions), dtype=np.int32)
        own = place[row.token_index] >= 0
        fields = {name: _own(getattr(row, name), own) for name in PackedRow.FIELDS[3:]}
        fields["token_index"] = place[fields["token_index"]]
        if len(row.candidate_counts):
            fields["candidate_ids"] = row.candidate_ids[np.repeat(own, row.candidate_counts)]
        else:
            fields["candidate_ids"] = row.candidate_ids
        part = PackedRow(row.input_ids[positions], row.position_ids[positions], row.cu_seqlens, **fields)
        return part, np.flatnonzero(own)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over the ranks of this place, in place."""
        for axis in (self.cp, self.sp):
            if axis.group is not None:
                dist.all_reduce(tensor, group=axis.group)
        return tensor


def _own(values: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Of a field that has one entry per term, or none at all, the own ones."""
    return values[own] if len(values) == len(own) else values


def gather_terms(outputs: HeadOutputs, own: torch.Tensor, terms: int, sequence: SequenceParallel) -> HeadOutputs:
    """The outputs of all terms of a row from those of this rank's, which alone carry a gradient. A collective.

    Args:
        own: int64 [n], which of the `terms` this rank's outputs are.
    """
    dtype = outputs.logprobs.dtype
    columns = (outputs.logprobs, outputs.entropy, outputs.argmax_hit.to(dtype))
    mine = torch.cat([torch.stack(columns, 1), outputs.top_logprobs], 1).detach()
    # A sum with zeros: exact, and ranks need not have equally many terms.
    all_terms = sequence.sum_(mine.new_zeros(terms, mine.shape[1]).index_copy(0, own, mine))
    return HeadOutputs(
        all_terms[:, 0].index_copy(0, own, outputs.logprobs),
        all_terms[:, 1],
        all_terms[:, 2] > 0.5,
        all_terms[:, 3:].index_copy(0, own, outputs.top_logprobs),
    )
