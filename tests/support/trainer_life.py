"""A trainer's life against the step engine: requests, commits, checkpoints, kills."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fake_engine import FakeSource, fake_engine, settle
from trainers.data import Rows
from trainers.errors import DatasetError
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.snapshot import Snapshot, write_snapshot
from trainers.streams import Stream


@dataclass(frozen=True)
class Saved:
    """A checkpoint: None for the run's beginning, which every kill may lead back to."""

    folder: Path | None
    version: int
    trained: tuple[tuple[int, ...], ...]


class Trainer:
    """Knows what the surviving timeline trained: `trained`, by step the names that `FakeSource` gave its samples."""

    def __init__(self, config: Any, rows: Rows | Stream, folder: Path, world_size: int = 1) -> None:
        self.config, self.rows, self.world_size, self.folder = config, rows, world_size, folder
        self.names: dict[int, tuple[int, int, int]] = {}
        self.saves = [Saved(None, 0, ())]
        self.boot(self.saves[0])

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint."""
        return self.saves[-1].folder

    def boot(self, saved: Saved) -> None:
        self.request: asyncio.Task[Any] | None = None
        self.step: Any = None
        self.done = False
        self.trained = [list(names) for names in saved.trained]
        self.index, self.version = len(self.trained), saved.version
        self.source = FakeSource(names=self.names)
        self.engine: StepEngine = fake_engine(
            self.config,
            self.source,
            self.rows,
            resume=saved.folder,
            version=self.version,
            step=self.index,
            world_size=self.world_size,
        )
        self.sync()

    def sync(self) -> None:
        self.engine.synced(self.version)

    async def settle(self) -> None:
        """Let everything run that waits neither for the test nor for the trainer; a stream is read by a thread."""
        await settle()
        while self.engine.reader is not None and self.engine.reader.waits_for is not None:
            await asyncio.sleep(0.0002)
            await settle()

    async def ask(self) -> None:
        if self.request is None and self.step is None and not self.done:
            self.request = asyncio.create_task(self.engine.step(self.index + 1, self.version))
        await self.settle()
        if self.request is not None and self.request.done():
            try:
                self.step = self.request.result()
            except DatasetError as error:
                # So ends a run whose groups were all dropped.
                assert "nothing was trained" in str(error) and not any(self.trained), error
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

    def save(self) -> dict[str, Any]:
        state, arrays, kept = self.engine.snapshot()
        folder = self.folder / str(len(self.saves))
        write_snapshot(folder, Snapshot(json.loads(json.dumps(state)), arrays, kept))
        self.saves.append(Saved(folder, self.version, tuple(tuple(names) for names in self.trained)))
        return state

    async def kill(self, back_to: int = -1) -> None:
        """Killed and started again from the checkpoint of that number; those after it belong to a timeline that is gone."""
        await self.engine.close()
        if self.request is not None:
            self.request.cancel()
        saved = self.saves[back_to]
        del self.saves[self.saves.index(saved) + 1 :]
        self.boot(saved)


async def finish_all(trainer: Trainer) -> None:
    """Finish every group, those that start meanwhile too."""
    await trainer.settle()
    while trainer.source.pending:
        trainer.source.finish(0)
        await trainer.settle()


async def run_out(trainer: Trainer) -> None:
    """Train all there is."""
    while not trainer.done:
        await finish_all(trainer)
        await trainer.ask()
        trainer.commit()
