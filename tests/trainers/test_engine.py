"""The step engine with a deterministic fake source: exactly once under any interleaving, no deadlock, staleness, end of data."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fake_engine import FakeSource, fake_config, fake_engine, fake_rows, settle
from trainers.errors import DatasetError, NoProgress
from trainers.rollouts.engine import StepEngine, write_snapshot
from trainers.step_source import BUFFER_FILE, STATE_FILE


class Trainer:
    """A trainer's life against the engine: requests, commits, checkpoints, kills. Remembers what the surviving timeline trained."""

    def __init__(self, config: Any, prompts: int, world_size: int, folder: Path) -> None:
        self.config, self.rows, self.world_size, self.folder = config, fake_rows(prompts), world_size, folder
        self.trained: list[list[int]] = []  # by step, the names of its samples
        self.names: dict[int, tuple[int, int, int]] = {}
        self.saved: Path | None = None
        self.saved_version = self.saves = 0
        self.saved_trained: list[list[int]] = []
        self.boot()

    def boot(self) -> None:
        self.request: asyncio.Task[Any] | None = None
        self.step: Any = None
        self.done = False
        self.trained = list(self.saved_trained)
        self.index, self.version = len(self.trained), self.saved_version
        self.source = FakeSource(names=self.names)
        self.engine: StepEngine = fake_engine(
            self.config,
            self.source,
            self.rows,
            resume=self.saved,
            version=self.version,
            step=self.index,
            world_size=self.world_size,
        )
        self.sync()

    def sync(self) -> None:
        self.engine.synced(self.version)

    async def ask(self) -> None:
        if self.request is None and self.step is None and not self.done:
            self.request = asyncio.create_task(self.engine.step(self.index + 1, self.version))
        await settle()
        if self.request is not None and self.request.done():
            self.step = self.request.result()
            self.request = None
            self.done = self.step is None

    def commit(self) -> None:
        if self.step is None:
            return
        rows = [row for microbatch in self.step.rows for row in microbatch]
        names = [int(row.targets[row.sequence_index == i][0]) for row in rows for i in range(len(row.cu_seqlens) - 1)]
        self.index += 1
        self.trained.append(names)
        self.engine.committed(self.index)
        self.step = None
        self.version += 1
        self.sync()

    def save(self) -> None:
        state, arrays = self.engine.snapshot()
        self.saves += 1
        self.saved = self.folder / str(self.saves)
        write_snapshot(self.saved, json.loads(json.dumps(state)), arrays)
        self.saved_version, self.saved_trained = self.version, list(self.trained)

    async def kill(self) -> None:
        await self.engine.close()
        if self.request is not None:
            self.request.cancel()
        self.boot()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_exactly_once_under_any_interleaving(data: st.DataObject) -> None:
    draw = data.draw
    prompts = draw(st.integers(1, 9), label="prompts")
    config = fake_config(
        num_train_epochs=draw(st.sampled_from([1.0, 1.5, 2.0]), label="epochs"),
        per_device_train_batch_size=draw(st.integers(1, 4), label="row samples"),
        gradient_accumulation_steps=draw(st.integers(1, 2)),
        token_budget=draw(st.sampled_from([0, 12, 30])),
        max_staleness=draw(st.integers(0, 2), label="staleness"),
        queue_maxsize=draw(st.sampled_from([1, 3, 64])),
        save_rollout_buffer=draw(st.booleans()),
        rollout_worker_timeout=1000,
    )
    world_size = draw(st.integers(1, 2))

    async def scenario(folder: Path) -> None:
        trainer = Trainer(config, prompts, world_size, folder)
        for _ in range(draw(st.integers(0, 40), label="actions")):
            await settle()
            action = draw(st.sampled_from(["finish", "finish", "finish", "ask", "ask", "commit", "save", "kill"]))
            if action == "finish" and trainer.source.pending:
                position = draw(st.integers(0, len(trainer.source.pending) - 1))
                rewards = draw(st.sampled_from([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], []]))
                lengths = draw(st.sampled_from([[3, 3], [1, 5], [2, 40], [0, 2]]))
                trainer.source.finish(position, rewards, lengths[: len(rewards)])
                await settle()
            elif action == "ask":
                await trainer.ask()
            elif action == "commit":
                trainer.commit()
            elif action == "save":
                trainer.save()
            elif action == "kill":
                await trainer.kill()
        # From here on everything goes well; it must come to an end.
        for _ in range(400):
            await settle()
            while trainer.source.pending:
                trainer.source.finish(0)
                await settle()
            await trainer.ask()
            trainer.commit()
            if trainer.done:
                break
        assert trainer.done, trainer.engine.describe()
        ledger = trainer.engine.ledger
        await trainer.engine.close()

        sizes = {epoch: ledger.size(epoch) for epoch in range(3) if ledger.size(epoch)}
        totals = {epoch: counts["trained"] + sum(counts["dropped"].values()) for epoch, counts in ledger.summary.items()}
        assert totals == sizes
        names = [name for step in trainer.trained for name in step]
        assert len(names) == len(set(names)), "a sample was trained twice"
        generations = {trainer.names[name] for name in names}
        prompts_trained = [(epoch, row) for epoch, row, _ in generations]
        assert len(prompts_trained) == len(set(prompts_trained)), "two generations of one prompt were trained in an epoch"
        for epoch, counts in ledger.summary.items():
            assert counts["trained"] == sum(key[0] == epoch for key in prompts_trained)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
