"""SFT: the negative log-likelihood of completion tokens."""

from __future__ import annotations

import numpy as np
import torch

from trainers.algorithms import LossInputs
from trainers.algorithms.sft import SFT
from trainers.config import SFTConfig
from trainers.rollouts.reconcile import reconcile
from trainers.types import Prompt, Rollout, RolloutGroup, TurnRecord, VersionSpan

ALGORITHM = SFT(SFTConfig(model="m", dataset={"path": "d.jsonl"}))  # type: ignore[arg-type]


def test_loss_is_the_summed_negative_log_likelihood():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    nothing = torch.zeros(3)
    hits = torch.tensor([True, False, True])
    output = ALGORITHM.loss(
        LossInputs(logprobs, nothing, hits, nothing, nothing, torch.zeros(3, dtype=torch.long), *[nothing.view(3, 1)] * 2)
    )
    loss, denominator = output.losses[0]
    assert (loss.item(), denominator) == (3.5, "tokens")
    numerator, count = output.metrics["token_accuracy"]
    assert float(numerator / count) == float(torch.tensor(2 / 3))


def test_a_dataset_row_is_kept_and_trained_on_its_completion_only():
    prompt = Prompt(1, 7, [], {}, np.array([3, 4], np.int32))
    turn = TurnRecord(prompt.token_ids, np.array([5, 2], np.int32), np.zeros(2, np.float32), [VersionSpan(0, 2, 0)], "stop")
    group = RolloutGroup(prompt, [Rollout(prompt, [turn], reconciled=reconcile([turn], 1))])
    assert ALGORITHM.requests(prompt) == [] and ALGORITHM.keep(group) is None
    (sample,) = ALGORITHM.samples(group)
    assert sample.token_ids.tolist() == [3, 4, 5, 2] and sample.loss_mask.tolist() == [False, False, True, True]
    assert (sample.advantage, sample.group) == (0.0, "1:7")
