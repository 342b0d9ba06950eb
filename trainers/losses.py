"""From an objective's sums to one scalar, divided over the whole optimizer step."""

from __future__ import annotations

import torch

from trainers.algorithms import LossInputs, LossOutput
from trainers.batch import PackedBatch
from trainers.head import HeadOutputs
from trainers.types import StepTotals


def loss_inputs(outputs: HeadOutputs, batch: PackedBatch) -> LossInputs:
    """The model's per-term outputs and the row's per-term data, side by side."""
    return LossInputs(
        logprobs=outputs.logprobs,
        entropy=outputs.entropy,
        argmax_hit=outputs.argmax_hit,
        sampler_logprobs=batch.sampler_logprobs,
        advantages=batch.advantages,
        sequence_index=batch.sequence_index,
        top_logprobs=outputs.top_logprobs,
        other_top_logprobs=batch.top_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
        teacher_index=batch.teacher_index,
        positions=batch.target_positions,
    )


def normalise(output: LossOutput, totals: StepTotals, world_size: int) -> torch.Tensor:
    """Σ sum / whole-step count over the output's losses.

    Summed over all rows of the step (micro-batches and ranks; gradients are summed, not averaged) this is the objective of the
    step taken at once, however its samples were laid out. A micro-batch mean of means would weigh short rows more.
    """
    counts = {"tokens": totals.tokens, "sequences": totals.sequences, "ranks": world_size}
    terms = [value / max(counts[denominator], 1) for value, denominator in output.losses]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]
