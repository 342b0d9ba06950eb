"""Packed rows as tensors on the trainer's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainers.attention.layout import PackedLayout
from trainers.head import Candidates
from trainers.types import PackedRow


@dataclass(slots=True)
class PackedBatch:
    """One row on the device. Shapes as in `PackedRow`, with a leading batch dimension of 1 on `input_ids` and `position_ids`.

    An empty row is forwarded as one token of id 0 without a loss term, so that every rank takes part in every collective.
    """

    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    layout: PackedLayout
    token_index: torch.Tensor  # int64 [N]
    targets: torch.Tensor  # int64 [N]
    sampler_logprobs: torch.Tensor  # float [N]
    advantages: torch.Tensor  # float [N]
    sequence_index: torch.Tensor  # int64 [N]
    top_ids: torch.Tensor  # int64 [N, K]
    top_logprobs: torch.Tensor  # float [N, K], the sampler's or the teacher's
    candidates: Candidates | None  # None: every token was sampled among the whole vocabulary
    teacher_logprobs: torch.Tensor  # float [N], empty if no sample of the row has a teacher
    teacher_index: torch.Tensor  # int64 [N], empty likewise
    terms: int

    @classmethod
    def from_row(cls, row: PackedRow, device: torch.device, dtype: torch.dtype = torch.float32) -> PackedBatch:
        """Copy a row to `device`; per-term floats become `dtype`."""
        if not len(row.input_ids):
            zero = np.zeros(1, np.int32)
            row = PackedRow(zero, zero, np.array([0, 1], np.int32), *(getattr(row, name)[:0] for name in PackedRow.FIELDS[3:]))

        def move(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
            tensor = torch.from_numpy(np.array(array)).to(kind)  # a copy: rows may be read-only views of a receive buffer
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        candidates = None
        counts = row.candidate_counts
        if len(counts):
            candidates = Candidates(
                ids=move(row.candidate_ids, torch.int64),
                owner=move(np.repeat(np.arange(len(counts)), counts), torch.int64),
                limited=move(counts > 0, torch.bool),
                offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            )
        return cls(
            input_ids=move(row.input_ids, torch.int64).unsqueeze(0),
            position_ids=move(row.position_ids, torch.int64).unsqueeze(0),
            layout=PackedLayout.from_numpy(row.cu_seqlens, device),
            token_index=move(row.token_index, torch.int64),
            targets=move(row.targets, torch.int64),
            sampler_logprobs=move(row.sampler_logprobs, dtype),
            advantages=move(row.advantages, dtype),
            sequence_index=move(row.sequence_index, torch.int64),
            top_ids=move(row.top_ids, torch.int64),
            top_logprobs=move(row.top_logprobs, dtype),
            candidates=candidates,
            teacher_logprobs=move(row.teacher_logprobs, dtype),
            teacher_index=move(row.teacher_index, torch.int64),
            terms=len(row.targets),
        )
