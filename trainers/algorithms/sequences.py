"""From the turns of a rollout to training samples (NumPy only)."""

from __future__ import annotations

import numpy as np

from trainers.types import Rollout, RolloutGroup, Sample, TurnRecord


def _chains(turns: list[TurnRecord]) -> list[list[TurnRecord]]:
    """Turns whose prompt continues the tokens held so far stay together; any other turn starts a new sequence."""
    chains: list[list[TurnRecord]] = []
    held = np.empty(0, np.int32)
    for turn in turns:
        continues = bool(chains) and len(turn.prompt_ids) >= len(held) and np.array_equal(turn.prompt_ids[: len(held)], held)
        if continues:
            chains[-1].append(turn)
        else:
            chains.append([turn])
        held = np.concatenate([turn.prompt_ids, turn.output_ids])
    return chains


def _sample(group: str, chain: list[TurnRecord], advantage: float) -> Sample:
    last = chain[-1]
    token_ids = np.concatenate([last.prompt_ids, last.output_ids]).astype(np.int32)
    loss_mask = np.zeros(len(token_ids), bool)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), -1, np.int32)
    for turn in chain:
        start = len(turn.prompt_ids)
        stop = start + len(turn.output_ids)
        loss_mask[start:stop] = True
        logprobs[start:stop] = turn.output_logprobs
        for span in turn.spans:
            versions[start + span.start : start + span.stop] = span.version
    # Nothing predicts the first token of a sequence.
    loss_mask[:1] = False
    trained = versions[loss_mask]
    return Sample(
        group=group,
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampler_logprobs=np.where(loss_mask, logprobs, np.float32(0)),
        advantage=advantage,
        version_min=int(trained.min(initial=2**31 - 1)) if len(trained) else 0,
        version_max=int(trained.max(initial=0)),
        versions=np.where(loss_mask, versions, np.int32(-1)),
    )


def rollout_samples(rollout: Rollout, advantage: float) -> list[Sample]:
    """One sample per sequence of the rollout, all with its advantage; sequences without a trained token are left out.

    A turn's prompt normally holds everything before it, so a rollout gives one sample; where the prompt was rewritten
    between turns it forks into several.
    """
    samples = [_sample(rollout.prompt.id, chain, advantage) for chain in _chains(rollout.turns)]
    return [sample for sample in samples if sample.loss_mask.any()]


def group_samples(group: RolloutGroup) -> list[Sample]:
    """The samples of all rollouts of a group; without advantages they are 0."""
    advantages = group.advantages if group.advantages is not None else np.zeros(len(group.rollouts), np.float32)
    assert len(advantages) == len(group.rollouts), f"{len(advantages)} advantages for {len(group.rollouts)} rollouts"
    return [
        sample
        for rollout, value in zip(group.rollouts, advantages, strict=True)
        for sample in rollout_samples(rollout, float(value))
    ]
