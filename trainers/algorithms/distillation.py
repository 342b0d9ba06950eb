"""On-policy distillation: the student learns from what served teachers say of its own completions (arXiv:2306.13649)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainers.algorithms import GenerationRequest, LossInputs, LossOutput, SamplerNeeds
from trainers.algorithms.sequences import keep_terms, rollout_samples
from trainers.config import DistillationConfig
from trainers.types import Prompt, RolloutGroup, Sample, TeacherScores


class Distillation:
    """A group is one rollout, and its advantage the weight of its tokens: 1, or what makes every teacher weigh the same."""

    generates = True

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config
        # One loss has tops of the teacher, the other of the sampler.
        self.objective = f"distillation loss={config.loss} teacher_temperature={config.teacher_temperature:g}"
        self.dense = config.loss == "jsd"
        self.beta = config.beta if self.dense else 1.0  # of a policy gradient the divergence is reported only

    def sampler_needs(self) -> SamplerNeeds:
        """The divergence is of the whole distributions, whatever part of them was sampled from."""
        return SamplerNeeds(self.config.sampler_tops, self.config.restricts_sampling and not self.dense)

    def requests(self, prompt: Prompt) -> list[GenerationRequest]:
        return [GenerationRequest(self.config.temperature, self.config.max_completion_length)]

    def advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [G], all 1."""
        return np.ones(len(group.rollouts), np.float32)

    def keep(self, group: RolloutGroup) -> str | None:
        return None

    def samples(self, group: RolloutGroup) -> list[Sample]:
        made: list[Sample] = []
        for rollout in group.rollouts:
            assert rollout.teacher_scores is not None, f"a rollout of {group.prompt.id} was never scored by a teacher"
            samples = rollout_samples(rollout, 1.0)
            made += [self._taught(*pair) for pair in zip(samples, rollout.teacher_scores, strict=True)]
        return made

    def _taught(self, sample: Sample, scores: TeacherScores) -> Sample:
        """The sample with its teacher's word, trained only where there is one."""
        targets = sample.token_ids[sample.loss_mask]
        assert len(scores.known) == len(targets), f"a teacher scored {len(scores.known)} of {len(targets)} trained tokens"
        assert not (scores.ids == targets[:, None]).any(), "a realised token is among the teacher's others, and counts twice"
        sample.teacher, sample.teacher_logprobs = scores.teacher, scores.target_logprobs
        said = np.isfinite(scores.target_logprobs)
        if self.dense:
            sample.top_ids, sample.top_logprobs = scores.ids, scores.logprobs
            said |= np.isfinite(scores.logprobs).any(1)
        keep_terms(sample, scores.known & said)
        return sample

    def step(self, samples: Sequence[Sample]) -> None:
        """Weights N / (teachers × N of the sample's teacher) with `teacher_balance`, N the step's trained tokens; else 1."""
        tokens: Counter[str | None] = Counter()
        for sample in samples:
            tokens[sample.teacher] += sample.trained_tokens
        for sample in samples:
            share = tokens.total() / (len(tokens) * tokens[sample.teacher])
            sample.advantage = share if self.config.teacher_balance else 1.0

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Σ weight × JSD, or the policy loss of advantages weight × (log P_T − log π); divided by the step's trained tokens."""
        from trainers.divergence import divergence_metrics, sparse_jsd, supports
        from trainers.policy_losses import policy_loss

        assert inputs.teacher_logprobs is not None
        divergence = sparse_jsd(*supports(inputs, self.dense), self.beta, self.config.add_tail_bucket)
        metrics = divergence_metrics(inputs, divergence, self.config.teachers)
        if self.dense:
            return LossOutput([((inputs.advantages * divergence.jsd).sum(), "tokens")], metrics)
        advantages = inputs.advantages * (inputs.teacher_logprobs - inputs.logprobs).detach()
        loss, of_policy = policy_loss(replace(inputs, advantages=advantages), self.config)
        return LossOutput([(loss, "tokens")], metrics | of_policy)
