"""A real teacher: what it answers is the model's own log-softmax at `teacher_temperature`, over both endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.distillation import distillation_config, group
from tests.support.tiny_model import VOCABULARY, build_model, build_tiny_model, build_tokenizer
from trainers.errors import ServerCapabilityError
from trainers.metrics import MetricBag
from trainers.rollouts.reconcile import reconcile
from trainers.rollouts.teachers import TeacherScorer
from trainers.types import Prompt, Rollout, TurnRecord, VersionSpan
from trainers.vocabulary import local_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed")

TOP_K = 64  # the whole vocabulary
STUDENT_MAX = 256


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server as flows start teachers; its key is in VLLM_TEACHER_API_KEY. About a minute."""
    from infra.leases import LeaseManager
    from infra.registry import Registry
    from infra.vllm import ServerSpec, start_server

    folder = tmp_path_factory.mktemp("teacher")
    spec = ServerSpec.teacher(str(build_tiny_model(folder / "model", seed=0)), name="teacher", device="cpu")
    with LeaseManager(Registry(folder / "leases.db")) as leases, pytest.MonkeyPatch.context() as patch:
        server = start_server(spec, leases.lease_port(), log_path=folder / "log")
        try:
            server.wait_ready()
            patch.setenv("VLLM_TEACHER_API_KEY", server.api_key)
            patch.setenv("VLLM_API_KEY", "of the students")
            yield server.url
        finally:
            server.stop()


async def scorer_of(url: str, **changes: object) -> TeacherScorer:
    config = distillation_config(teacher_server_urls={"real": url}, **({"teacher_top_k": TOP_K} | changes))
    load = lambda root: local_tokenizer(root, False)  # noqa: E731
    return TeacherScorer(config, build_tokenizer(), load, at_once=8, metrics=MetricBag(), progress=lambda: None)


def rollout(seed: int) -> Rollout:
    rng = np.random.default_rng(seed)
    prompt, output = (rng.integers(6, len(VOCABULARY), length).astype(np.int32) for length in (20, 40 + seed))
    turn = TurnRecord(prompt, output, np.zeros(len(output), np.float32), [VersionSpan(0, len(output), 0)], "stop")
    return Rollout(Prompt(0, seed, [], {}, prompt, {}), [turn], reconciled=reconcile([turn], 1024))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize("endpoint", ["generate", "completions"])
async def test_scores_are_the_models_own(teacher: str, endpoint: str, temperature: float) -> None:
    model = build_model(seed=0)
    scorer = await scorer_of(teacher, teacher_temperature=temperature)
    try:
        await scorer.open(STUDENT_MAX)
        client = scorer._teachers["real"].client
        if endpoint == "completions":
            assert client.server.facts is not None and client.form == "generate"
            client.server.facts = replace(client.server.facts, generate=False)
            await client.probe(len(VOCABULARY))
        assert client.form == endpoint
        ones = [rollout(seed) for seed in range(3)]
        for one in ones:
            await scorer.score(group(one))
    finally:
        await scorer.close()
    for one in ones:
        assert one.failed is None and one.teacher_scores is not None and one.reconciled is not None
        (score,), (sequence,) = one.teacher_scores, one.reconciled.sequences
        with torch.no_grad():
            logits = model(torch.tensor(sequence.token_ids, dtype=torch.long)[None]).logits[0]
        trained = np.flatnonzero(sequence.loss_mask)
        wanted = (logits / temperature).log_softmax(-1).numpy()[trained - 1]
        rows = np.arange(len(trained))
        np.testing.assert_allclose(score.target_logprobs, wanted[rows, sequence.token_ids[trained]], atol=1e-4)
        found = np.full_like(wanted, np.nan)
        listed = score.ids >= 0
        found[np.nonzero(listed)[0], score.ids[listed]] = score.logprobs[listed]
        found[rows, sequence.token_ids[trained]] = score.target_logprobs
        np.testing.assert_allclose(found, wanted, atol=1e-4)  # no token of the vocabulary is left out
        order = np.where(listed, score.logprobs, -np.inf)
        assert (np.diff(order[:, : TOP_K - 1], axis=1) <= 0).all(), "not by rank"


async def test_a_cpu_server_does_not_score_chosen_ids(teacher: str) -> None:
    scorer = await scorer_of(teacher, beta=1.0, exact_reverse_kl=True, teacher_top_k=8)
    try:
        with pytest.raises(ServerCapabilityError, match=r"teacher `real`.*does not score chosen ids"):
            await scorer.open(STUDENT_MAX)
    finally:
        await scorer.close()


async def test_a_student_as_long_as_the_teacher_is_refused(teacher: str) -> None:
    scorer = await scorer_of(teacher)
    try:
        with pytest.raises(ServerCapabilityError, match=r"takes 512 tokens and the student's servers 512.*--max-model-len 513"):
            await scorer.open(512)
    finally:
        await scorer.close()


def test_the_vocabulary_of_a_folder_is_read(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    found = local_tokenizer(str(tmp_path), False)
    assert found is not None and found.get_vocab() == build_tokenizer().get_vocab()
    assert local_tokenizer(str(tmp_path / "of another machine"), False) is None
