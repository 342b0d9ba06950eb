"""What a planned step says about itself, `batch/…` and `sample/…`, and what a group costs that is not trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainers.metrics import MetricBag
from trainers.planner import attention_cost
from trainers.types import RolloutGroup, Sample, StepPlan


def measure_step(
    metrics: MetricBag,
    samples: Sequence[Sample],
    plan: StepPlan,
    token_budget: int | None,
    train_version: int,
    generates: bool,
    multiple: int = 1,
) -> None:
    """Metrics of one whole step, over all its ranks and micro-batches, whose rows are padded to a `multiple` of tokens."""
    now = time.monotonic()
    lengths = [len(sample.token_ids) for sample in samples]
    trained = [sample.trained_tokens for sample in samples]
    slots = sum(len(microbatch) for microbatch in plan.rows)
    forwarded = sum(lengths)
    metrics.add("batch/forwarded_tokens_per_step", forwarded)
    metrics.add("batch/trained_tokens_per_step", sum(trained))
    metrics.add("batch/samples_per_step", len(samples))
    metrics.add("batch/groups_per_step", len({sample.group for sample in samples}))
    metrics.add("batch/microbatches_per_step", len(plan.rows))
    metrics.add("batch/masked_token_frac", forwarded - sum(trained), forwarded)
    metrics.add("batch/samples_per_row", len(samples), slots)
    metrics.add("batch/row_tokens_mean", forwarded, slots)
    padding = sum(-sum(lengths[i] for i in row) % multiple for microbatch in plan.rows for row in microbatch)
    metrics.add("batch/pad_frac", padding, forwarded + padding)
    if token_budget is not None:
        metrics.add("batch/row_fill_frac", forwarded, slots * token_budget)
    for microbatch in plan.rows:
        loads = [sum(attention_cost(lengths[i]) for i in row) for row in microbatch]
        for row in microbatch:
            metrics.add("batch/row_tokens_max", sum(lengths[i] for i in row))
        if sum(loads):
            metrics.add("batch/row_imbalance", max(loads) * len(loads) / sum(loads))
    metrics.add("sample/forwarded_tokens_mean", forwarded, len(samples))
    metrics.add("sample/forwarded_tokens_max", max(lengths))
    metrics.add("sample/trained_tokens_mean", sum(trained), len(samples))
    metrics.add("sample/time_in_queue_s", sum(now - sample.queued_at for sample in samples), len(samples))
    if generates:
        staleness = [train_version - sample.version_min for sample in samples]
        metrics.add("sample/staleness_mean", sum(staleness), len(samples))
        metrics.add("sample/staleness_max", max(staleness))


def lost_tokens(group: RolloutGroup, samples: Sequence[Sample], kept: Sequence[Sample]) -> int:
    """Sampled tokens that are not trained on: all of a group that is dropped, else those of samples that are."""
    if not kept:
        return sum(rollout.sampled_tokens for rollout in group.rollouts)
    return sum(sample.trained_tokens for sample in samples) - sum(sample.trained_tokens for sample in kept)
