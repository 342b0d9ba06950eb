"""What tests of teachers build: a config, a scorer over stub teachers, rollouts to score."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from tests.support.fake_engine import CharTokenizer
from tests.support.stub_server import StubServer
from tests.support.stub_teacher import VOCABULARY, StubTeacher
from trainers.config import DistillationConfig
from trainers.metrics import MetricBag
from trainers.rollouts.build import build_engine
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.payload import Payload
from trainers.rollouts.reconcile import reconcile
from trainers.rollouts.teachers import TeacherScorer
from trainers.types import Prompt, Rollout, RolloutGroup, TurnRecord, VersionSpan

STUDENT_MAX = 64


class NamingTokenizer(CharTokenizer):
    """One that tells its vocabulary. `changed`: ids whose token is another, None: that have none."""

    def __init__(self, changed: Mapping[int, str | None] | None = None) -> None:
        self.vocabulary = {index: f"t{index}" for index in range(VOCABULARY)}
        for index, token in (changed or {}).items():
            self.vocabulary.pop(index)
            if token is not None:
                self.vocabulary[index] = token

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in self.vocabulary.items()}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.vocabulary.get(index, "") for index in ids)


def distillation_config(**changes: Any) -> DistillationConfig:
    values: dict[str, Any] = {"model": "none", "dataset": {"path": "none"}, "token_budget": 0, "max_completion_length": 8}
    values |= {"per_device_train_batch_size": 1000, "max_rollout_failure_frac": 1.0}
    return DistillationConfig.model_validate(values | changes)


@asynccontextmanager
async def scoring(
    *stubs: StubTeacher,
    tokenizer: Any = None,
    load_tokenizer: Callable[[str | None], Any] = lambda root: None,
    progress: Callable[[], None] = lambda: None,
    metrics: MetricBag | None = None,
    **changes: Any,
) -> AsyncIterator[TeacherScorer]:
    """An opened scorer; the teachers are called `t0`, `t1`, …"""
    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub.run())
        config = distillation_config(teacher_server_urls={f"t{i}": stub.url for i, stub in enumerate(stubs)}, **changes)
        scorer = TeacherScorer(
            config,
            tokenizer or CharTokenizer(),
            load_tokenizer,
            at_once=64,
            metrics=metrics or MetricBag(),
            progress=progress,
        )
        stack.push_async_callback(scorer.close)
        await scorer.open(STUDENT_MAX)
        yield scorer


def rollout(seed: int = 0, teacher: str = "t0", turns: int = 1, tops: int = 0) -> Rollout:
    """Of `turns` turns; after each comes a user's message. `tops`: so many of the student's likeliest ids at every token."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(4, VOCABULARY, 5).astype(np.int32)
    held, made = prompt, []
    for _ in range(turns):
        output = rng.integers(4, VOCABULARY, 6).astype(np.int32)
        turn = TurnRecord(held, output, np.full(6, -0.5, np.float32), [VersionSpan(0, 6, 0)], "stop")
        if tops:
            turn.top_ids = np.stack([rng.choice(VOCABULARY, tops, replace=False) for _ in output]).astype(np.int32)
            turn.top_ids[0, 0] = output[0]
            turn.top_logprobs = np.full(turn.top_ids.shape, -1.0, np.float32)
        made.append(turn)
        held = np.concatenate([held, output, rng.integers(4, VOCABULARY, 3).astype(np.int32)])
    data = {"prompt": "p", "teacher_id": teacher}
    return Rollout(Prompt(0, seed, [], data, prompt, data), made, reconciled=reconcile(made, 1024))


def group(one: Rollout) -> RolloutGroup:
    return RolloutGroup(one.prompt, [one])


def rows(*teachers: Any) -> list[dict[str, Any]]:
    """A row for each; None: without teacher."""
    return [{"prompt": f"p{i}", "teacher_id": teacher} for i, teacher in enumerate(teachers)]


async def built(student: StubServer, teachers: Mapping[str, str], dataset: Any, **changes: Any) -> StepEngine:
    """An engine over the real loop, not started."""
    config = distillation_config(vllm_server_base_url=student.url, teacher_server_urls=dict(teachers), **changes)
    payload = Payload(dataset=dataset, tokenizer=CharTokenizer())
    options: dict[str, Any] = {"version": 0, "resume_step": 0, "resume_dir": None, "world_size": 1}
    engine, _ = await build_engine(config, payload, say=lambda doing: None, **options)
    return engine
