"""Teachers in place of rewards: each rollout is scored by the one its row names.

    group ─▶ teacher of the row ─▶ one request per sequence ─▶ its trained positions ─▶ rollout.teacher_scores
                    ▲
       start: reachable? long enough? same vocabulary? can it score as this run needs?

Invariants:
- a rollout leaves with one `TeacherScores` for each of its sequences, or with `failed`;
- what one teacher does holds up no rows of another's;
- nothing a teacher answers to one request ends the run; too many failures do, and so does one that stays away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trainers.config_distillation import DistillationConfig
from trainers.errors import ServerCapabilityError
from trainers.metrics import MetricBag
from trainers.rollouts.group_scorer import GroupScorer
from trainers.rollouts.protocol import RequestFailed, Retryable
from trainers.rollouts.reconcile import TokenSequence
from trainers.rollouts.teacher import Teacher
from trainers.rollouts.teacher_client import TeacherNeeds
from trainers.rollouts.tries import within
from trainers.roster import plain_url
from trainers.routing import teacher_of
from trainers.types import Rollout, RolloutGroup, TeacherScores
from trainers.vocabulary import difference, served_difference, vocabulary_of

logger = logging.getLogger(__name__)


class TeacherScorer(GroupScorer):
    """Scores groups with the teachers of a config.

    Args:
        tokenizer: the student's.
        load_tokenizer: gives the tokenizer of what a server was started with, None where its files are not here; may block.
        at_once: most requests in flight to one teacher.
        metrics: where `teacher_score_s/…` and `rollout/score_s` go.
        progress: called while a teacher that cannot be reached is waited for.
    """

    judges = frozenset({"teacher"})

    def __init__(
        self,
        config: DistillationConfig,
        tokenizer: Any,
        load_tokenizer: Callable[[str | None], Any | None],
        *,
        at_once: int,
        metrics: MetricBag,
        progress: Callable[[], None],
    ) -> None:
        self.pending = 0
        self._wait_s = min(config.vllm_server_timeout, config.rollout_worker_timeout)
        self._needs = TeacherNeeds.of(config)
        self._tokenizer, self._load_tokenizer, self._metrics = tokenizer, load_tokenizer, metrics
        self._vocabulary = vocabulary_of(tokenizer)
        self._vocab_size = len(tokenizer) if self._vocabulary is None else max(self._vocabulary) + 1
        self._teachers = {
            name: Teacher(
                name,
                plain_url(url),
                self._needs,
                budget_s=config.vllm_server_timeout,
                at_once=config.teacher_concurrency or at_once,
                failure_limit=config.max_teacher_failure_frac,
                on_retry=lambda cause: metrics.add("rollout/vllm_retry_total", 1),
                on_wait=progress,
            )
            for name, url in config.teacher_server_urls.items()
        }

    async def open(self, student_max_model_len: int) -> None:
        for teacher in self._teachers.values():
            await teacher.open(self._wait_s, student_max_model_len)
            await self._check_vocabulary(teacher)
            await teacher.probe(self._wait_s, self._vocab_size)

    async def _check_vocabulary(self, teacher: Teacher) -> None:
        """Raises `ServerCapabilityError` if the teacher's is another; warns if that cannot be told."""
        server = teacher.client.server
        assert server.facts is not None, "it was opened"
        if self._vocabulary is None:
            _warn_of_unknown(teacher, f"the student's tokenizer, a {type(self._tokenizer).__name__}, has no get_vocab()")
            return
        tokenizer = await asyncio.to_thread(self._load_tokenizer, server.facts.root)
        theirs = None if tokenizer is None else vocabulary_of(tokenizer)
        try:
            if theirs is not None:
                found = difference(self._vocabulary, theirs)
            else:
                async with within(self._wait_s):
                    found = await served_difference(self._tokenizer, sorted(self._vocabulary), server.facts.model, server.post)
        except (Retryable, LookupError, ValueError) as error:
            _warn_of_unknown(teacher, f"no files of {server.facts.root} are on this machine, and {error}")
            return
        if found is not None:
            raise ServerCapabilityError(
                f"{teacher.label} has another vocabulary than the student: {found} (the student's first). It would read other "
                "tokens than were sampled: use a teacher with the student's tokenizer"
            )

    async def score(self, group: RolloutGroup) -> None:
        """Set `teacher_scores` or `failed` of every rollout.

        Raises:
            ServerError: a teacher stays unreachable.
            RolloutFailures: too many rollouts of one teacher failed.
        """
        began = time.monotonic()
        self.pending += 1
        try:
            await asyncio.gather(*(self._score(rollout) for rollout in group.rollouts if rollout.failed is None))
        finally:
            self.pending -= 1
        self._metrics.add("rollout/score_s", time.monotonic() - began)

    async def _score(self, rollout: Rollout) -> None:
        assert rollout.reconciled is not None, f"a rollout of {rollout.prompt.id} was never reconciled"
        teacher = self._teachers[teacher_of(rollout.prompt.data, rollout.prompt.row, list(self._teachers))]
        chosen = _tops(rollout, self._needs.top_k) if self._needs.chosen else None
        sequences = rollout.reconciled.sequences
        try:
            scores = await asyncio.gather(*(self._sequence(teacher, sequence, chosen) for sequence in sequences))
        except RequestFailed as error:
            rollout.failed = f"teacher: {teacher.label}: {error}"
            teacher.failures.add(error.cause, str(error))
        else:
            rollout.teacher_scores = scores
            teacher.failures.add(None)
        teacher.failures.check()

    async def _sequence(self, teacher: Teacher, sequence: TokenSequence, tops: np.ndarray | None) -> TeacherScores:
        """`tops`: int32 [O, K], ids to score of every sampled token of the rollout."""
        trained = np.flatnonzero(sequence.loss_mask)
        start = int(trained[0])
        chosen = None
        if tops is not None:
            chosen = np.full((len(sequence.token_ids) - start, tops.shape[1]), -1, np.int32)
            chosen[trained - start] = tops[sequence.origin[trained]]
        scored, seconds = await teacher.score(sequence.token_ids, start, chosen)
        self._metrics.add(f"teacher_score_s/{teacher.name}", seconds)
        scored = scored.at(trained - start)
        padding = scored.ids >= self._vocab_size  # logits that no token has
        return TeacherScores(
            teacher=teacher.name,
            ids=np.where(padding, -1, scored.ids),
            logprobs=np.where(padding, np.float32(-np.inf), scored.logprobs),
            target_logprobs=scored.targets,
            known=~np.isnan(scored.targets),
            score_s=seconds,
        )

    def check(self, final: bool = False) -> None:
        for teacher in self._teachers.values():
            teacher.failures.check(final)

    def describe(self) -> str:
        waits = [text for teacher in self._teachers.values() if (text := teacher.describe()) is not None]
        return f"scoring: {'; '.join(waits) or f'{self.pending} groups'}"

    async def close(self) -> None:
        for teacher in self._teachers.values():
            await teacher.close()


def _tops(rollout: Rollout, top_k: int) -> np.ndarray:
    """int32 [O, K]: the student's likeliest ids at every sampled token of a rollout."""
    tops = [turn.top_ids for turn in rollout.turns if len(turn.output_ids)]
    given = [ids for ids in tops if ids is not None]
    assert len(given) == len(tops), f"{len(given)} of {len(tops)} turns carry the student's likeliest tokens"
    return np.concatenate(given)[:, :top_k] if given else np.zeros((0, top_k), np.int32)


def _warn_of_unknown(teacher: Teacher, why: str) -> None:
    logger.warning(
        "whether %s has the student's vocabulary could not be told (%s). If it has another one, the student learns the wrong "
        "tokens: make sure that both were started with the same tokenizer",
        teacher.label,
        why,
    )
