"""Whole runs with tools and with an environment against the real server: a tiny model that knows the form learns to win.

    demonstrations ─▶ imitate ─▶ model ─▶ TrainLoop ◀─ rows ─ RolloutProcess ◀─ turns ─▶ vLLM
                                              └────────────── weights ────────────────────┘

The server's own weights do not matter: the run's first sync replaces them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.calculator_tool import calculator, right_answer
from tests.conftest import SharedServer
from tests.support.calling_model import VOCABULARY, Revealing, answered, build_tokenizer, called, imitate, model_written, said
from tests.support.policies import ONE_RANK
from trainers import attention
from trainers.algorithms import build_algorithm
from trainers.config import GRPOConfig
from trainers.loop import TrainLoop
from trainers.model import build_policy
from trainers.rollouts.payload import Payload
from trainers.rollouts.process import RolloutProcess
from trainers.rollouts.tools import make_tool
from trainers.types import PackedRow
from trainers.weight_sync.sync import ServerSync

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
STEPS = 25


class RecordedProcess(RolloutProcess):
    """Keeps the rows it hands over."""

    def __init__(self, config: GRPOConfig, payload: Payload) -> None:
        super().__init__(config, payload)
        self.rows: list[PackedRow] = []

    def fetch(self, index: int, rank: int) -> list[PackedRow]:
        rows = super().fetch(index, rank)
        self.rows += rows
        return rows


@dataclass
class Recorder:
    """A metric sink that keeps what it is told."""

    steps: list[dict[str, float]] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.kept += rows

    def started(self, info: Any, resume_step: int) -> None: ...
    def commit(self, step: int) -> None: ...
    def bottleneck(self, step: int, text: str) -> None: ...
    def checkpoint(self, step: int, path: str) -> None: ...

    def mean(self, name: str, steps: slice) -> float:
        return float(np.mean([metrics[name] for metrics in self.steps[steps] if name in metrics]))


def train(
    server: SharedServer, folder: Path, model: Any, payload: Payload, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[Recorder, list[PackedRow]]:
    """A run of `STEPS` steps: what was logged, and the rows that were trained."""
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    model.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    settings = {
        "model": str(folder / "model"),
        "dataset": {"path": "train_dataset"},
        "output_dir": str(folder / "run"),
        "vllm_server_base_url": server.url,
        "max_steps": STEPS,
        "save_steps": 1000,
        "num_train_epochs": 1000,
        "per_device_train_batch_size": 64,
        "token_budget": 0,
        "max_concurrent_rollouts": 64,
        "max_staleness": 2,
        "max_completion_length": 32,
        "learning_rate": 3e-4,
        "gradient_checkpointing": False,
        "keep_rollout_every": 50,
    }
    config = GRPOConfig.model_validate(settings | fields)
    tokenizer = build_tokenizer()
    attention.install(ONE_RANK.device, torch.float32, log=False)
    model.set_attn_implementation(attention.NAME)
    recorder, source = Recorder(), RecordedProcess(config, payload)
    TrainLoop(
        config,
        build_algorithm(config),
        build_policy(model, config, ONE_RANK),
        ONE_RANK,
        source,
        tokenizer=tokenizer,
        weight_sync=ServerSync(config, ONE_RANK, tokenizer),
        sink=recorder,
    ).run()
    assert len(recorder.steps) == STEPS
    return recorder, source.rows


def sequences(rows: list[PackedRow]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids and trained places of every sequence in rows."""
    found = []
    for row in rows:
        trained = np.zeros(len(row.input_ids), bool)
        trained[row.token_index + 1] = True
        for begin, end in pairwise(row.cu_seqlens):
            found.append((row.input_ids[begin:end], trained[begin:end]))
    return found


def check_masks(rows: list[PackedRow]) -> None:
    """What the model wrote is trained and nothing else: no token of a prompt, of a template or of what a tool said.

    A few calls of a beginner are rendered otherwise than it wrote them: what was put in place of its tokens is not trained.
    """
    whole = 0
    for ids, trained in sequences(rows):
        written = model_written(ids)
        words = " ".join(f"{VOCABULARY[token]}{'*' * int(one)}" for token, one in zip(ids, trained, strict=True))
        assert not (trained & ~written).any(), words
        last = int(np.flatnonzero(~written)[-1]) + 1
        assert trained[last:].all(), words
        whole += (trained == written).all()
    assert whole > 0.95 * len(sequences(rows))


def turns_of(ids: np.ndarray) -> int:
    return int((ids == VOCABULARY.index("<assistant>")).sum())


def rises(recorder: Recorder, margin: float) -> None:
    """The reward of the last five steps is above that of the first five."""
    before, after = recorder.mean("reward", slice(0, 5)), recorder.mean("reward", slice(-5, None))
    print(f"reward {before:.3f} → {after:.3f}", [round(metrics.get("reward", -1), 2) for metrics in recorder.steps])
    assert after > before + margin, (before, after)


def test_a_model_learns_to_use_a_calculator(vllm_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the demonstrations guess a sum, which the model cannot work out; the others ask the calculator."""
    draw = random.Random(0)

    def demonstration(asks: bool) -> list[dict[str, Any]]:
        a, b = draw.randint(10, 49), draw.randint(10, 49)
        question = {"role": "user", "content": f"{a}+{b}"}
        if not asks:
            return [question, said(str(draw.randint(20, 98)))]
        result = str(calculator(f"{a}+{b}"))
        call = called("calculator", expression=f"{a}+{b}")
        return [question, call, answered("calculator", result), said(result)]

    asking = [demonstration(asks=True) for _ in range(1000)]
    guessing = [demonstration(asks=False) for _ in range(1000)]
    model = imitate(asking, asking + guessing, [make_tool(calculator).schema], free=0)
    pairs = [(draw.randint(10, 49), draw.randint(10, 49)) for _ in range(512)]
    payload = Payload(
        reward_funcs=[right_answer],
        tools=[calculator],
        dataset=[{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs],
    )
    recorder, rows = train(vllm_server, tmp_path, model, payload, monkeypatch, max_tool_calling_iterations=1)
    rises(recorder, 0.3)
    check_masks(rows)
    turns = Counter(turns_of(ids) for ids, _ in sequences(rows))
    assert turns[1] > 0 and turns[2] > turns.total() / 2, turns
    last = recorder.steps[-1]
    assert last["tools/calculator/call_total"] > 64
    assert recorder.mean("tools/call_frequency", slice(-5, None)) > recorder.mean("tools/call_frequency", slice(0, 5)) + 0.2
    assert any(row["tool_calls"] == 1 and row["turns"] == 2 and row["reward"] == 1 for row in recorder.kept)


@pytest.mark.slow
def test_a_model_learns_a_game_of_two_turns(vllm_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of ten demonstrations heed what the game answered; the others guess on by chance."""
    draw = random.Random(0)

    def demonstration(heeds: bool) -> list[dict[str, Any]]:
        game, secret = Revealing(), draw.randint(1, 9)
        messages = [{"role": "user", "content": game.reset(secret)}]
        while game.left and not game.won:
            number = secret if heeds and game.left == 1 else draw.randint(1, 9)
            messages += [called("guess", number=number), answered("guess", game.guess(number))]
        return [*messages, said("")]

    heeding = [demonstration(heeds=True) for _ in range(800)]
    careless = [demonstration(heeds=False) for _ in range(1200)]
    first = 10  # tokens of the first guess
    model = imitate(heeding, heeding + careless, [make_tool(Revealing().guess).schema], free=first)
    payload = Payload(dataset=[{"secret": 1 + index % 9} for index in range(96)])
    fields = {"environment_factory": "tests.support.calling_model:Revealing", "max_tool_calling_iterations": 2}
    recorder, rows = train(vllm_server, tmp_path, model, payload, monkeypatch, **fields)
    rises(recorder, 0.2)
    check_masks(rows)
    turns = Counter(turns_of(ids) for ids, _ in sequences(rows))
    assert turns[2] > 0 and turns[3] > turns.total() / 2, turns  # the last one only ends the conversation
    last = recorder.steps[-1]
    assert last["tools/guess/call_total"] > 64
    assert last["rewards/Revealing"] == last["reward"]
    assert all(name in last for name in ("env/reset_s", "env/step_s", "env/reward_s"))
