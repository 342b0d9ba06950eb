"""From the turns of a rollout to training samples (NumPy only).

One conversation, one advantage: every sequence that reconciliation makes of it carries the same.

    reconciled sequences with `origin` ─▶ per-token arrays of all turns, gathered at the trained tokens ─▶ samples
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.errors import ConfigError
from trainers.rollouts.reconcile import TokenSequence
from trainers.types import Rollout, RolloutGroup, Sample, TurnRecord


class _Sampled:
    """What is known of every sampled token of a rollout: arrays over all turns' outputs, laid end to end."""

    def __init__(self, turns: Sequence[TurnRecord]) -> None:
        self.logprobs = np.concatenate([turn.output_logprobs for turn in turns]).astype(np.float32, copy=False)
        self.versions = np.concatenate([_versions(turn) for turn in turns])
        filled = [turn for turn in turns if len(turn.output_ids)]
        self._top_ids = _joined([turn.top_ids for turn in filled])
        self._top_logprobs = _joined([turn.top_logprobs for turn in filled])
        self._candidate_ids = _joined([turn.candidate_ids for turn in filled])
        self._candidate_counts = _joined([turn.candidate_counts for turn in filled])

    def fill(self, sample: Sample, index: np.ndarray) -> None:
        """Set the `top_*` and `candidate_*` fields of a sample whose trained tokens are those at `index`."""
        if self._top_ids is not None and self._top_logprobs is not None:
            sample.top_ids, sample.top_logprobs = self._top_ids[index], self._top_logprobs[index]
        if self._candidate_ids is not None and self._candidate_counts is not None:
            counts = self._candidate_counts[index]
            ends = np.cumsum(self._candidate_counts)
            shift = (ends - self._candidate_counts)[index] - (np.cumsum(counts) - counts)
            sample.candidate_ids = self._candidate_ids[np.repeat(shift, counts) + np.arange(counts.sum())]
            sample.candidate_counts = counts


def _versions(turn: TurnRecord) -> np.ndarray:
    """int32 [O]: the policy version that sampled each token of a turn."""
    versions = np.full(len(turn.output_ids), -1, np.int32)
    for span in turn.spans:
        versions[span.start : span.stop] = span.version
    return versions


def _joined(arrays: list[np.ndarray | None]) -> np.ndarray | None:
    """The turns' arrays laid end to end; None if no turn has one."""
    given = [array for array in arrays if array is not None]
    assert len(given) in (0, len(arrays)), f"{len(given)} of {len(arrays)} turns carry what the sampler was asked for"
    return np.concatenate(given) if given else None


def _sample(group: str, sequence: TokenSequence, sampled: _Sampled, advantage: float) -> Sample:
    mask = sequence.loss_mask
    index = sequence.origin[mask]
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = sampled.logprobs[index]
    versions = np.full(len(mask), -1, np.int32)
    trained = versions[mask] = sampled.versions[index]
    sample = Sample(
        group=group,
        token_ids=sequence.token_ids,
        loss_mask=mask,
        sampler_logprobs=logprobs,
        advantage=advantage,
        version_min=int(trained.min()),
        versions=versions,
    )
    sampled.fill(sample, index)
    return sample


def rollout_samples(rollout: Rollout, advantage: float) -> list[Sample]:
    """One sample per sequence of the rollout, all with its advantage; sequences without a trained token are left out.

    A turn's prompt normally holds everything before it, so a rollout gives one sample; where the prompt was rewritten
    between turns it may fork into several.
    """
    assert rollout.reconciled is not None, f"a rollout of {rollout.prompt.id} was never reconciled"
    if not rollout.reconciled.sequences:
        return []
    sampled = _Sampled(rollout.turns)
    return [_sample(rollout.prompt.id, sequence, sampled, advantage) for sequence in rollout.reconciled.sequences]


def keep_terms(sample: Sample, keep: np.ndarray) -> None:
    """Make context of the trained tokens where `keep` (bool [M]) is False, in place."""
    if keep.all():
        return
    off = np.flatnonzero(sample.loss_mask)[~keep]
    sample.loss_mask[off] = False
    sample.sampler_logprobs[off], sample.versions[off] = 0.0, -1
    if keep.any():
        sample.version_min = int(sample.versions[sample.loss_mask].min())
    if sample.candidate_ids is not None and sample.candidate_counts is not None:
        sample.candidate_ids = sample.candidate_ids[np.repeat(keep, sample.candidate_counts)]
    for name in ("top_ids", "top_logprobs", "candidate_counts", "teacher_logprobs"):
        if (values := getattr(sample, name)) is not None:
            setattr(sample, name, values[keep])


def group_samples(group: RolloutGroup) -> list[Sample]:
    """The samples of all rollouts of a group; without advantages they are 0.

    Raises:
        ConfigError: its advantages are not finite.
    """
    advantages = group.advantages if group.advantages is not None else np.zeros(len(group.rollouts), np.float32)
    assert len(advantages) == len(group.rollouts), f"{len(advantages)} advantages for {len(group.rollouts)} rollouts"
    if not np.isfinite(advantages).all():
        raise ConfigError(
            f"compute_advantages returned {advantages.tolist()}: give every rollout a finite number, and 0 to one whose reward "
            "is NaN, which means that no reward function applied to it"
        )
    return [
        sample
        for rollout, value in zip(group.rollouts, advantages, strict=True)
        for sample in rollout_samples(rollout, float(value))
    ]
