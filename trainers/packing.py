"""Samples to packed rows, and steps to raw arrays and back. NumPy array code, no per-token Python.

A row lays its samples end to end without padding. The loss term of the token at row position p has `token_index` p − 1: the
position whose logits predict it. See `PackedRow` for the worked example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.types import PackedRow, Sample, Step, StepPlan, StepTotals


def pack_row(samples: Sequence[Sample]) -> PackedRow:
    """One row of samples, in order. No samples: the empty row (T = 0, N = 0)."""
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if not samples:
        ids, reals = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return PackedRow(ids, ids, cu_seqlens, ids, ids, reals, reals, ids)
    input_ids = np.concatenate([sample.token_ids for sample in samples]).astype(np.int32, copy=False)
    mask = np.concatenate([sample.loss_mask for sample in samples])
    assert not mask[cu_seqlens[:-1]].any(), "the first token of a sequence cannot be trained: nothing predicts it"
    owner = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
    where = np.flatnonzero(mask)
    logprobs = np.concatenate([sample.sampler_logprobs for sample in samples])
    advantages = np.array([sample.advantage for sample in samples], dtype=np.float32)
    return PackedRow(
        input_ids=input_ids,
        position_ids=(np.arange(len(input_ids)) - np.repeat(cu_seqlens[:-1], lengths)).astype(np.int32),
        cu_seqlens=cu_seqlens,
        token_index=(where - 1).astype(np.int32),
        targets=input_ids[where],
        sampler_logprobs=logprobs[where].astype(np.float32, copy=False),
        advantages=advantages[owner[where]],
        sequence_index=owner[where],
    )


def pack_step(index: int, plan: StepPlan, samples: Sequence[Sample], metrics: dict[str, tuple[float, float]]) -> Step:
    """A planned step with its rows packed and counted."""
    return Step(
        index=index,
        rows=[[pack_row([samples[i] for i in row]) for row in microbatch] for microbatch in plan.rows],
        totals=StepTotals(
            tokens=sum(sample.trained_tokens for sample in samples),
            sequences=len(samples),
            groups=len({sample.group for sample in samples}),
            forwarded_tokens=sum(len(sample.token_ids) for sample in samples),
        ),
        metrics=metrics,
    )


def step_to_wire(step: Step) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A step as JSON fields and named arrays: one array per field of `PackedRow`, over all rows, and the rows' lengths."""
    rows = [row for microbatch in step.rows for row in microbatch]
    arrays = {name: np.concatenate([getattr(row, name) for row in rows]) for name in PackedRow.FIELDS}
    lengths = np.array([[len(getattr(row, name)) for name in PackedRow.FIELDS] for row in rows], dtype=np.int64)
    totals = step.totals
    fields = {
        "index": step.index,
        "microbatches": len(step.rows),
        "totals": [totals.tokens, totals.sequences, totals.groups, totals.forwarded_tokens],
        "metrics": {name: list(pair) for name, pair in step.metrics.items()},
    }
    return fields, {**arrays, "lengths": lengths}


def step_from_wire(fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> Step:
    """Inverse of `step_to_wire`; the rows' arrays are views of the received buffers."""
    lengths = arrays["lengths"]
    columns = [np.split(arrays[name], np.cumsum(lengths[:-1, column])) for column, name in enumerate(PackedRow.FIELDS)]
    rows = [PackedRow(*parts) for parts in zip(*columns, strict=True)]
    width = len(rows) // fields["microbatches"]
    return Step(
        index=fields["index"],
        rows=[rows[start : start + width] for start in range(0, len(rows), width)],
        totals=StepTotals(*fields["totals"]),
        metrics={name: (pair[0], pair[1]) for name, pair in fields["metrics"].items()},
    )
