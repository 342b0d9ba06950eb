"""Where the segments of a packed row lie, as the attention backends need it.

A row of segments of 3 and 2 tokens has `cu_seqlens=[0, 3, 5]`, `max_seqlen=3`; padded into a batch, its tokens sit at
`pad_index=[0, 1, 2, 3, 4]` of the flattened [2 × 3] grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainers.sequence_parallel import SequenceParallel


@dataclass(slots=True)
class PackedLayout:
    """Segments of one row of T tokens. Made on the host, once per row, and used by every layer."""

    cu_seqlens: torch.Tensor  # int32 [S + 1] on the model's device
    pad_index: torch.Tensor  # int64 [T], position of each token in the padded [S, max_seqlen] grid
    segments: int
    max_seqlen: int
    block_mask: Any = None  # flex only: made by the backend at the first layer, shared by the others
    sequence: SequenceParallel | None = None  # the ranks that share this row; each has a part of its T tokens

    @classmethod
    def from_numpy(
        cls, cu_seqlens: np.ndarray, device: torch.device | str, sequence: SequenceParallel | None = None
    ) -> PackedLayout:
        lengths = np.diff(cu_seqlens)
        assert len(lengths) and lengths.min() > 0, f"a segment of a packed row is empty: lengths {lengths.tolist()}"
        max_seqlen = int(lengths.max())
        segment = np.repeat(np.arange(len(lengths)), lengths)
        pad_index = segment * max_seqlen + np.arange(int(cu_seqlens[-1])) - cu_seqlens[segment]
        return cls(
            cu_seqlens=torch.from_numpy(np.ascontiguousarray(cu_seqlens, np.int32)).to(device, non_blocking=True),
            pad_index=torch.from_numpy(pad_index.astype(np.int64)).to(device, non_blocking=True),
            segments=len(lengths),
            max_seqlen=max_seqlen,
            sequence=sequence,
        )
