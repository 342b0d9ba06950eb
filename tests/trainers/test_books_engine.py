"""Books through the rollout side: from the token cache to packed rows, and on from where a checkpoint was."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_model import build_tokenizer
from trainers.config import SFTConfig
from trainers.errors import DatasetError
from trainers.rollouts.build import build_engine
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.payload import Payload
from trainers.rollouts.snapshot import write_snapshot
from trainers.types import Step

LENGTH = 64


def config(tmp_path: Path, **fields: Any) -> SFTConfig:
    folder = tmp_path / "books"
    if not folder.exists():
        folder.mkdir()
        for number in range(3):
            words = np.random.default_rng(number).choice(["calm", "sea", "wind", "rain"], 80)
            (folder / f"{number}.txt").write_text(" ".join(words))
    settings: Any = {"books": {"cache_dir": str(tmp_path / "cache")}, "max_length": LENGTH, **fields}
    return SFTConfig(model="m", dataset={"path": str(folder)}, **settings)  # type: ignore[arg-type]


async def engine(
    settings: SFTConfig, resume: Path | None = None, step: int = 0, world_size: int = 1
) -> tuple[StepEngine, dict]:
    said: list[str] = []
    made, info = await build_engine(
        settings,
        Payload(tokenizer=build_tokenizer()),
        version=0,
        resume_step=step,
        resume_dir=resume,
        world_size=world_size,
        say=said.append,
    )
    made.start()
    assert any(line.startswith("reading folder") for line in said)
    return made, info


def ids(step: Step | None) -> list[list[int]]:
    assert step is not None
    return [row.input_ids.tolist() for microbatch in step.rows for row in microbatch]


def test_every_sequence_is_trained_once_and_a_resume_goes_on_behind_the_last(tmp_path):
    settings = config(tmp_path, packing=False, gradient_accumulation_steps=2, num_train_epochs=1)

    async def whole() -> list[list[list[int]]]:
        made, info = await engine(settings)
        assert info["max_sequence_tokens"] == LENGTH and info["token_budget"] is None
        steps, index = [], 0
        while (step := await made.step(index := index + 1, 0)) is not None:
            steps.append(ids(step))
            made.committed(index)
            if index == 2:
                write_snapshot(tmp_path / "checkpoint", made.snapshot())
        await made.close()
        return steps

    async def resumed() -> list[list[list[int]]]:
        made, _ = await engine(settings, tmp_path / "checkpoint", step=2)
        steps, index = [], 2
        while (step := await made.step(index := index + 1, 0)) is not None:
            steps.append(ids(step))
            made.committed(index)
        await made.close()
        return steps

    steps = asyncio.run(whole())
    rows = [row for step in steps for row in step if row]
    assert all(len(step) == 2 for step in steps) and all(len(row) <= LENGTH for row in rows)
    texts = [(tmp_path / "books" / f"{number}.txt").read_text() for number in range(3)]
    tokenizer = build_tokenizer()
    line = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    expected = [line[start : start + LENGTH] for start in range(0, len(line), LENGTH)]
    assert sorted(rows) == sorted(expected) and rows != expected, "every sequence once, shuffled"
    assert asyncio.run(resumed()) == steps[2:]


def test_rows_are_packed_or_hold_one_sequence(tmp_path):
    async def first(**fields: Any) -> Step | None:
        made, _ = await engine(config(tmp_path, **fields), world_size=2)
        step = await made.step(1, 0)
        await made.close()
        return step

    def segments(step: Step | None) -> list[list[int]]:
        assert step is not None
        return [np.diff(row.cu_seqlens).tolist() for microbatch in step.rows for row in microbatch]

    assert segments(asyncio.run(first(shuffle=False, packing=False))) == [[64], [64]]
    assert segments(asyncio.run(first(shuffle=False, token_budget=128))) == [[64, 64], [64, 64]]
    assert segments(asyncio.run(first(shuffle=False, packing=False, pad_to_multiple_of=48))) == [[96], [96]]


def test_other_books_are_not_gone_on_with(tmp_path):
    async def begun() -> None:
        made, _ = await engine(config(tmp_path))
        write_snapshot(tmp_path / "checkpoint", made.snapshot())
        await made.close()

    asyncio.run(begun())
    (tmp_path / "books" / "1.txt").write_text("another book")
    with pytest.raises(DatasetError, match=r"books changed, or max_length.* did: its fingerprint is"):
        asyncio.run(engine(config(tmp_path), tmp_path / "checkpoint"))


def test_no_array_of_a_long_sequence_becomes_a_list(tmp_path):
    tokens = 1 << 18
    settings = config(tmp_path, max_length=tokens, packing=False, shuffle=False)
    (tmp_path / "books" / "long.txt").write_text("the sea was calm " * (tokens // 8))
    asyncio.run(_one_step(settings))  # now its tokens are in the cache
    lists: list[int] = []

    def watch(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ == "tolist":
            lists.append(function.__self__.size)

    tracemalloc.start()
    sys.setprofile(watch)
    try:
        step = asyncio.run(_one_step(settings))
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert max(len(row.input_ids) for row in step.rows[0]) == tokens
    assert max(lists, default=0) < 1000
    assert peak < 100 * tokens, "of the sequences read ahead too; a list of positions alone takes 36 bytes each"


async def _one_step(settings: SFTConfig) -> Step:
    made, _ = await engine(settings)
    step = await made.step(1, 0)
    await made.close()
    assert step is not None
    return step
