"""Samples to packed rows, and rows to raw arrays and back. NumPy array code, no per-token Python.

A row lays its samples end to end without padding. The loss term of the token at row position p has `token_index` p − 1: the
position whose logits predict it. See `PackedRow` for the worked example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trainers.errors import ConfigError
from trainers.types import PackedRow, Sample, Step, StepHead, StepPlan, StepTotals


def pack_row(samples: Sequence[Sample], top_k: int | None = None, teachers: Sequence[str] = ()) -> PackedRow:
    """One row of samples, in order. No samples: the empty row (T = 0, N = 0).

    Args:
        top_k: K of the row's `top_ids`, the same for all rows of a step; None: what these samples need.
        teachers: the names that `teacher_index` numbers.

    Raises:
        ConfigError: a sample's teacher is not among them.
    """
    top_k = top_width(samples) if top_k is None else top_k
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if not samples:
        ids, reals = np.zeros(0, np.int32), np.zeros(0, np.float32)
        tops = np.zeros((0, top_k), np.int32), np.zeros((0, top_k), np.float32)
        return PackedRow(ids, ids, cu_seqlens, ids, ids, reals, reals, ids, *tops, ids, ids, reals, ids)
    input_ids = np.concatenate([sample.token_ids for sample in samples]).astype(np.int32, copy=False)
    mask = np.concatenate([sample.loss_mask for sample in samples])
    assert not mask[cu_seqlens[:-1]].any(), "the first token of a sequence cannot be trained: nothing predicts it"
    owner = np.repeat(np.arange(len(samples), dtype=np.int32), lengths)
    where = np.flatnonzero(mask)
    logprobs = np.concatenate([sample.sampler_logprobs for sample in samples])
    advantages = np.array([sample.advantage for sample in samples], dtype=np.float32)
    top_ids, top_logprobs = _tops(samples, len(where), top_k)
    candidate_ids, candidate_counts = _candidates(samples)
    teacher_logprobs, teacher_index = _teachers(samples, teachers)
    return PackedRow(
        input_ids=input_ids,
        position_ids=(np.arange(len(input_ids)) - np.repeat(cu_seqlens[:-1], lengths)).astype(np.int32),
        cu_seqlens=cu_seqlens,
        token_index=(where - 1).astype(np.int32),
        targets=input_ids[where],
        sampler_logprobs=logprobs[where].astype(np.float32, copy=False),
        advantages=advantages[owner[where]],
        sequence_index=owner[where],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        candidate_ids=candidate_ids,
        candidate_counts=candidate_counts,
        teacher_logprobs=teacher_logprobs,
        teacher_index=teacher_index,
    )


def top_width(samples: Sequence[Sample]) -> int:
    """The largest K among the samples' `top_ids`; 0 if none has any."""
    return max((sample.top_ids.shape[1] for sample in samples if sample.top_ids is not None), default=0)


def _tops(samples: Sequence[Sample], terms: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """`top_ids` and `top_logprobs` [terms, top_k] of a row; a sample without them, or with fewer, is filled up with "none"."""
    ids = np.full((terms, top_k), -1, np.int32)
    logprobs = np.full((terms, top_k), -np.inf, np.float32)
    start = 0
    for sample in samples if top_k else ():
        stop = start + sample.trained_tokens
        if sample.top_ids is not None and sample.top_logprobs is not None:
            width = sample.top_ids.shape[1]
            ids[start:stop, :width], logprobs[start:stop, :width] = sample.top_ids, sample.top_logprobs
        start = stop
    return ids, logprobs


def _candidates(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """`candidate_ids` and `candidate_counts` of a row; a sample without them was sampled among the whole vocabulary."""
    none = np.zeros(0, np.int32)
    if all(sample.candidate_ids is None for sample in samples):
        return none, none
    ids = [none if sample.candidate_ids is None else sample.candidate_ids for sample in samples]
    counts = [
        np.zeros(sample.trained_tokens, np.int32) if sample.candidate_counts is None else sample.candidate_counts
        for sample in samples
    ]
    return np.concatenate(ids), np.concatenate(counts)


def _teachers(samples: Sequence[Sample], teachers: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """`teacher_logprobs` and `teacher_index` of a row; a sample without a teacher has 0 and −1."""
    if all(sample.teacher_logprobs is None for sample in samples):
        return np.zeros(0, np.float32), np.zeros(0, np.int32)
    numbers = {name: number for number, name in enumerate(teachers)} | {None: -1}
    for sample in samples:
        if sample.teacher not in numbers:
            raise ConfigError(
                f"a sample of row {sample.group} was scored by a teacher {sample.teacher!r}, and teacher_server_urls names "
                f"{', '.join(teachers) or 'none'}: name it again"
            )
    counts = [sample.trained_tokens for sample in samples]
    logprobs = [
        np.zeros(count, np.float32) if sample.teacher_logprobs is None else sample.teacher_logprobs
        for sample, count in zip(samples, counts, strict=True)
    ]
    index = np.array([numbers[sample.teacher] for sample in samples], np.int32)
    return np.concatenate(logprobs), np.repeat(index, counts)


def row_multiple(cp_size: int, sp_size: int) -> int:
    """What the tokens of a row shared by cp_size × sp_size ranks must be a multiple of."""
    return 2 * cp_size * sp_size if cp_size > 1 else sp_size


def unshared_ranks(ranks: int, cp_size: int, sp_size: int) -> str | None:
    """What is wrong with this many ranks, of which cp_size × sp_size share each row; None: nothing."""
    place = cp_size * sp_size
    if ranks % place == 0:
        return None
    return (
        f"cp_size × sp_size = {cp_size} × {sp_size} ranks share each row, and {ranks} ranks are no multiple of that: start "
        f"{ranks + -ranks % place}, or lower cp_size or sp_size"
    )


def padded(row: PackedRow, multiple: int) -> PackedRow:
    """The row with its last sequence made longer by tokens of id 0, no terms; causal attention shows them to no other token."""
    missing = -len(row.input_ids) % multiple
    if not missing:
        return row
    last = row.position_ids[-1]
    return PackedRow(
        np.concatenate([row.input_ids, np.zeros(missing, np.int32)]),
        np.concatenate([row.position_ids, np.arange(last + 1, last + 1 + missing, dtype=np.int32)]),
        np.concatenate([row.cu_seqlens[:-1], row.cu_seqlens[-1:] + np.int32(missing)]),
        *(getattr(row, name) for name in PackedRow.FIELDS[3:]),
    )


def pack_step(
    index: int,
    plan: StepPlan,
    samples: Sequence[Sample],
    metrics: dict[str, tuple[float, float]],
    teachers: Sequence[str] = (),
    multiple: int = 1,
) -> Step:
    """A planned step with its rows packed, padded to a `multiple` of tokens, and counted. `teachers` as in `pack_row`."""
    top_k = top_width(samples)

    def packed(row: list[int]) -> PackedRow:
        made = pack_row([samples[i] for i in row], top_k, teachers)
        return padded(made, multiple) if row else made

    return Step(
        index=index,
        rows=[[packed(row) for row in microbatch] for microbatch in plan.rows],
        totals=StepTotals(
            tokens=sum(sample.trained_tokens for sample in samples),
            sequences=len(samples),
            groups=len({sample.group for sample in samples}),
            forwarded_tokens=sum(len(sample.token_ids) for sample in samples),
            squared_tokens=sum(len(sample.token_ids) ** 2 for sample in samples),
        ),
        metrics=metrics,
    )


def rows_to_wire(rows: Sequence[PackedRow]) -> dict[str, np.ndarray]:
    """Rows as named arrays, `<row>.<field>` for every field of `PackedRow`; nothing is copied."""
    return {f"{i}.{name}": getattr(row, name) for i, row in enumerate(rows) for name in PackedRow.FIELDS}


def rows_from_wire(arrays: dict[str, np.ndarray], count: int) -> list[PackedRow]:
    """Inverse of `rows_to_wire`."""
    return [PackedRow(**{name: arrays[f"{i}.{name}"] for name in PackedRow.FIELDS}) for i in range(count)]


def head_to_wire(step: StepHead) -> dict[str, Any]:
    """What rank 0 is told of a step, as JSON."""
    return {
        "index": step.index,
        "totals": asdict(step.totals),
        "metrics": {name: list(pair) for name, pair in step.metrics.items()},
    }


def head_from_wire(fields: dict[str, Any]) -> StepHead:
    """Inverse of `head_to_wire`."""
    metrics = {name: (pair[0], pair[1]) for name, pair in fields["metrics"].items()}
    return StepHead(fields["index"], StepTotals(**fields["totals"]), metrics)
