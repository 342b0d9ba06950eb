"""Distils a tiny model on one rank or several: `torchrun … distil_worker.py FOLDER`; what it logs is left in FOLDER.

    rollouts of a fixed sampler, each with the scores of one of two teachers ─▶ Distillation ─▶ rows ─▶ TrainLoop

A teacher is a table of next-token scores by the token before, over its own half of the vocabulary's contexts.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

from tests.support.fake_source import FakeSource
from tests.support.policies import distillation_config, tiny_policy
from trainers.algorithms.distillation import Distillation
from trainers.callbacks import PrintSink
from trainers.config import DistillationConfig
from trainers.distributed import Ranks, init_distributed, shutdown_distributed
from trainers.loop import TrainLoop
from trainers.rollouts.reconcile import reconcile
from trainers.types import Prompt, Rollout, RolloutGroup, Sample, TeacherScores, TurnRecord, VersionSpan

VOCABULARY, OUTPUTS = 64, 12
STEPS = 20


class TaughtSource(FakeSource):
    """Nine rollouts a step, three scored by teacher `a`, six by `b`; a tenth of the positions are unknown to them."""

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__(steps=STEPS, teachers=config.teachers)
        self.algorithm = Distillation(config)
        scores = np.random.default_rng(1).normal(0, 2, (VOCABULARY, VOCABULARY))
        self.table = (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)

    def samples(self, index: int) -> list[Sample]:
        rng = np.random.default_rng([self.seed, index])
        samples = [sample for row in range(9) for sample in self.algorithm.samples(self._group(index, row, rng))]
        self.algorithm.step(samples)
        return samples

    def _group(self, index: int, row: int, rng: np.random.Generator) -> RolloutGroup:
        teacher = "a" if row % 3 == 0 else "b"
        half = VOCABULARY // 2
        tokens = (rng.integers(0, half, 1 + OUTPUTS) + half * (teacher == "b")).astype(np.int32)
        prompt = Prompt(0, 10 * index + row, [], {}, tokens[:1])
        logprobs = np.full(OUTPUTS, -np.log(half), np.float32)
        turn = TurnRecord(tokens[:1], tokens[1:], logprobs, [VersionSpan(0, OUTPUTS, 0)], "length")
        scores = self._scores(teacher, tokens, rng)
        return RolloutGroup(prompt, [Rollout(prompt, [turn], reconciled=reconcile([turn], 1024), teacher_scores=[scores])])

    def _scores(self, teacher: str, tokens: np.ndarray, rng: np.random.Generator) -> TeacherScores:
        said, realised = self.table[tokens[:-1]], tokens[1:, None]
        likeliest = np.argsort(-said, 1)[:, : self.algorithm.config.teacher_tops].astype(np.int32)
        own = likeliest == realised
        return TeacherScores(
            teacher,
            np.where(own, np.int32(-1), likeliest),
            np.where(own, np.float32(-np.inf), np.take_along_axis(said, likeliest, 1)),
            np.take_along_axis(said, realised, 1)[:, 0],
            rng.random(OUTPUTS) < 0.9,
        )


def distil(ranks: Ranks, folder: Path) -> None:
    config = distillation_config(
        output_dir=str(folder / f"{ranks.world_size}"), max_steps=STEPS, save_steps=100, bf16=False, teacher_balance=True
    )
    policy = tiny_policy(config, torch.float32, ranks)
    loop = TrainLoop(
        config, Distillation(config), policy, ranks, TaughtSource(config) if ranks.is_main else None, sink=PrintSink()
    )
    loop.run()
    if ranks.is_main:
        (folder / f"history-{ranks.world_size}.json").write_text(json.dumps(loop.callbacks.state.log_history))


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    distil(init_distributed(120), folder)
    shutdown_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
