"""Packed rows as tensors on the trainer's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainers.attention.layout import PackedLayout
from trainers.head import Candidates
from trainers.sequence_parallel import SequenceParallel
from trainers.types import PackedRow


@dataclass(slots=True)
class PackedBatch:
    """One row on the device. Shapes as in `PackedRow`, with a leading batch dimension of 1 on `input_ids` and `position_ids`.

    An empty row is forwarded as one token of id 0 without a loss term, so that every rank takes part in every collective.

    Of a row that several ranks share, t of the (padded) T tokens and n of the N terms are this rank's: what the model and its
    head read is of these, `layout` and what the loss reads are of the whole row. Otherwise t = T and n = N.
    """

    input_ids: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t], within their sequence
    layout: PackedLayout
    token_index: torch.Tensor  # int64 [n], among the t tokens
    targets: torch.Tensor  # int64 [n]
    sampler_logprobs: torch.Tensor  # float [N]
    advantages: torch.Tensor  # float [N]
    sequence_index: torch.Tensor  # int64 [N]
    top_ids: torch.Tensor  # int64 [n, K]
    top_logprobs: torch.Tensor  # float [N, K], the sampler's or the teacher's
    candidates: Candidates | None  # None: every token was sampled among the whole vocabulary
    teacher_logprobs: torch.Tensor  # float [N], empty if no sample of the row has a teacher
    teacher_index: torch.Tensor  # int64 [N], empty likewise
    target_positions: torch.Tensor  # int64 [N], of the targets within their sequence
    terms: int  # N
    own_terms: torch.Tensor | None = None  # int64 [n], which of the N terms are this rank's; None: all

    @classmethod
    def from_row(
        cls,
        row: PackedRow,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        sequence: SequenceParallel | None = None,
    ) -> PackedBatch:
        """Copy a row to `device`; per-term floats become `dtype`.

        Args:
            sequence: the ranks that were given this row too; None: this one computes all of it.

        Raises:
            ConfigError: a row that cannot be shared so.
        """
        if not len(row.input_ids):
            zero = np.zeros(1, np.int32)
            row = PackedRow(zero, zero, np.array([0, 1], np.int32), *(getattr(row, name)[:0] for name in PackedRow.FIELDS[3:]))

        def move(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
            tensor = torch.from_numpy(np.array(array)).to(kind)  # a copy: rows may be read-only views of a receive buffer
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        part, own = (row, None) if sequence is None else sequence.part(row)
        candidates = None
        counts = part.candidate_counts
        if len(counts):
            candidates = Candidates(
                ids=move(part.candidate_ids, torch.int64),
                owner=move(np.repeat(np.arange(len(counts)), counts), torch.int64),
                limited=move(counts > 0, torch.bool),
                offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            )
        return cls(
            input_ids=move(part.input_ids, torch.int64).unsqueeze(0),
            position_ids=move(part.position_ids, torch.int64).unsqueeze(0),
            layout=PackedLayout.from_numpy(part.cu_seqlens, device, sequence),
            token_index=move(part.token_index, torch.int64),
            targets=move(part.targets, torch.int64),
            sampler_logprobs=move(row.sampler_logprobs, dtype),
            advantages=move(row.advantages, dtype),
            sequence_index=move(row.sequence_index, torch.int64),
            top_ids=move(part.top_ids, torch.int64),
            top_logprobs=move(row.top_logprobs, dtype),
            candidates=candidates,
            teacher_logprobs=move(row.teacher_logprobs, dtype),
            teacher_index=move(row.teacher_index, torch.int64),
            target_positions=move(row.position_ids[row.token_index] + 1, torch.int64),
            terms=len(row.targets),
            own_terms=None if own is None else move(own, torch.int64),
        )
