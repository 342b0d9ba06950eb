"""Loss by position within a sequence, in buckets that double: bucket b holds positions b … 2b − 1.

    nll [N], positions [N] ─▶ sums and counts per bucket, on the device ─▶ `loss_by_position/<b>`, reduced as other metrics are

A position is the number of tokens before the one that is predicted: the second token of a sequence has position 1. Where
positions that a model was not trained for are scaled wrongly, or not at all, the loss climbs in the last buckets.
"""

from __future__ import annotations

import torch

NAME = "loss_by_position"


def buckets(max_length: int) -> list[int]:
    """The first position of each bucket, for sequences of up to `max_length` tokens."""
    return [1 << power for power in range((max_length - 1).bit_length())]


def loss_by_position(
    nll: torch.Tensor, positions: torch.Tensor | None, max_length: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per bucket (sum of the loss, tokens), float64 scalars on the device; nothing is waited for.

    Args:
        nll: [N], detached.
        positions: int64 [N], from 1 to max_length − 1; None: of no tokens.
    """
    firsts = buckets(max_length)
    sums, counts = nll.new_zeros(2, len(firsts), dtype=torch.float64)
    if positions is not None and len(positions):
        _, exponents = torch.frexp(positions.double())  # 2^(e − 1) ≤ position < 2^e
        index = (exponents.long() - 1).clamp_(0, len(firsts) - 1)
        sums = sums.index_add(0, index, nll.double())
        counts = counts.index_add(0, index, torch.ones_like(nll, dtype=torch.float64))
    return {f"{NAME}/{first}": (sums[i], counts[i]) for i, first in enumerate(firsts)}
