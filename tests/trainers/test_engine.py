"""The step engine with a deterministic fake source: exactly once in any order, no deadlock, staleness, end of data."""

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
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.snapshot import write_snapshot
from trainers.step_source import BUFFER_FILE, STATE_FILE


class Trainer:
    """A trainer's life against the engine: requests, commits, checkpoints, kills; knows what the surviving timeline trained."""

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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_exactly_once_under_any_interleaving(data: st.DataObject) -> None:
    draw = data.draw
    prompts = draw(st.sampled_from([1, 3, 6, 9]), label="prompts")
    config = fake_config(
        num_train_epochs=draw(st.sampled_from([1.0, 1.5, 2.0]), label="epochs"),
        per_device_train_batch_size=draw(st.sampled_from([1, 1, 2, 3]), label="row samples"),
        gradient_accumulation_steps=draw(st.integers(1, 2)),
        token_budget=draw(st.sampled_from([0, 0, 12, 30])),
        max_staleness=draw(st.sampled_from([4, 2, 1, 0]), label="staleness"),
        queue_maxsize=draw(st.sampled_from([1, 3, 64])),
        save_rollout_buffer=draw(st.booleans()),
        rollout_worker_timeout=1000,
    )
    world_size = draw(st.integers(1, 2))

    async def scenario(folder: Path) -> None:
        trainer = Trainer(config, prompts, world_size, folder)
        for _ in range(draw(st.integers(4, 40), label="actions")):
            await settle()
            action = draw(
                st.sampled_from(
                    ["finish", "finish", "finish", "ask", "commit", "step", "step", "save", "kill", "save and kill"]
                )
            )
            if action in ("finish", "step") and trainer.source.pending:
                position = draw(st.integers(0, len(trainer.source.pending) - 1))
                rewards = draw(st.sampled_from([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0], []]))
                lengths = draw(st.sampled_from([[3, 3], [3, 3], [1, 5], [2, 40], [0, 2]]))
                trainer.source.finish(position, rewards, lengths[: len(rewards)])
                await settle()
            if action in ("ask", "step"):
                await trainer.ask()
            if action in ("commit", "step"):
                trainer.commit()
            if "save" in action:
                trainer.save()
            if "kill" in action:
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


async def finish_all(trainer: Trainer) -> None:
    await settle()
    while trainer.source.pending:
        trainer.source.finish(0)
        await settle()


async def run_out(trainer: Trainer) -> None:
    while not trainer.done:
        await finish_all(trainer)
        await trainer.ask()
        trainer.commit()


@pytest.mark.parametrize("buffered", [True, False])
async def test_a_group_with_a_trained_sample_is_never_generated_again(tmp_path: Path, buffered: bool) -> None:
    """Steps of one sample, groups of two: the checkpoint falls into the middle of a group."""
    config = fake_config(per_device_train_batch_size=1, save_rollout_buffer=buffered, shuffle=False)
    trainer = Trainer(config, 3, 1, tmp_path)
    await finish_all(trainer)
    await trainer.ask()
    trainer.commit()
    trainer.save()
    assert json.loads((tmp_path / "1" / STATE_FILE).read_text())["partial"] == [[0, 0]]
    await trainer.kill()
    await run_out(trainer)
    names = [name for step in trainer.trained for name in step]
    generations: dict[tuple[int, int], set[int]] = {}
    for name in names:
        epoch, row, generation = trainer.names[name]
        generations.setdefault((epoch, row), set()).add(generation)
    assert generations.keys() == {(0, 0), (0, 1), (0, 2)} and all(len(numbers) == 1 for numbers in generations.values())
    assert len(names) == (6 if buffered else 5)  # without the buffer the second sample of the half-trained group is lost
    assert trainer.engine.ledger.summary == {0: {"trained": 3, "dropped": {}}}
    await trainer.engine.close()


async def test_a_resumed_run_trains_the_same_steps(tmp_path: Path) -> None:
    """Planned and queued samples come back from the buffer in order, so the next steps are those the killed run had planned."""
    config = fake_config(per_device_train_batch_size=3, num_train_epochs=2)
    trainer = Trainer(config, 8, 1, tmp_path)
    await finish_all(trainer)
    await trainer.ask()
    trainer.commit()
    await trainer.ask()  # planned, handed over, not committed
    trainer.save()
    trainer.commit()
    expected = trainer.trained[1]
    await trainer.kill()
    await trainer.ask()
    trainer.commit()
    assert trainer.trained[1] == expected
    await trainer.engine.close()


async def test_stale_samples_are_dropped_at_planning_and_do_not_pin_the_resume_position(tmp_path: Path) -> None:
    trainer = Trainer(fake_config(max_staleness=1, per_device_train_batch_size=2, shuffle=False), 12, 1, tmp_path)
    await settle()
    late = trainer.source.pending[0][0]  # dispatched at version 0, finishes after the others
    for _ in range(2):
        trainer.source.finish(1)
        await settle()
        await trainer.ask()
        trainer.commit()
        await settle()
    assert trainer.version == 2
    trainer.source.finish_prompt(late)
    await trainer.ask()
    assert trainer.step is None, "a sample two versions old was trained although max_staleness is 1"
    trainer.save()
    state = json.loads((tmp_path / "1" / STATE_FILE).read_text())
    assert (state["next_index"], state["dropped"]) == (3, {"stale": 1})
    await run_out(trainer)
    assert trainer.engine.ledger.summary[0]["dropped"]["stale"] >= 1
    await trainer.engine.close()


async def test_nothing_is_generated_before_the_servers_hold_a_known_version() -> None:
    source = FakeSource()
    engine = fake_engine(fake_config(), source, fake_rows(4))
    await settle()
    assert source.pending == []
    engine.synced(0)
    await settle()
    assert source.pending
    await engine.close()


async def test_generation_does_not_run_far_ahead() -> None:
    source = FakeSource()
    config = fake_config(max_staleness=2, per_device_train_batch_size=4)
    engine = fake_engine(config, source, fake_rows(100))
    engine.synced(0)
    await settle(200)
    assert len(source.pending) == 6  # three steps of four samples, two samples a group
    while source.pending:
        source.finish(0)
        await settle()
    assert len(source.pending) == 0, "finished samples still count: the queue holds three steps"
    step = await engine.step(1, 0)
    assert step is not None and step.totals.sequences == 4
    await settle(200)
    assert len(source.pending) == 0, "version 0 could be three versions old when the next ones train"
    engine.committed(1)
    engine.synced(1)
    await settle(200)
    assert len(source.pending) == 2
    await engine.close()


async def test_drops_give_their_capacity_back() -> None:
    """Fifty groups in a row give nothing; the queue has room for one group."""
    source = FakeSource()
    engine = fake_engine(fake_config(queue_maxsize=1, max_staleness=0, per_device_train_batch_size=2), source, fake_rows(51))
    engine.synced(0)
    request = asyncio.create_task(engine.step(1, 0))
    for number in range(50):
        await settle()
        source.finish(0, [[1.0, 1.0], [], [0.0, 0.0]][number % 3])
    await settle()
    source.finish(0)
    step = await request
    assert step is not None and step.totals.sequences == 2
    assert step.metrics["rollout/dropped_groups_total/zero_variance"][0] == 33
    assert step.metrics["rollout/dropped_groups_total/failed"][0] == 17
    await engine.close()


async def test_the_last_partial_step_is_trained_and_then_the_data_is_finished() -> None:
    source = FakeSource()
    engine = fake_engine(fake_config(per_device_train_batch_size=4), source, fake_rows(3))
    engine.synced(0)
    await settle()
    while source.pending:
        source.finish(0)
        await settle()
    first, second = await engine.step(1, 0), await engine.step(2, 1)
    assert first is not None and second is not None
    assert (first.totals.sequences, second.totals.sequences) == (4, 2)
    assert second.totals.tokens == 6
    assert await engine.step(3, 2) is None
    await engine.close()


async def test_an_epoch_without_a_usable_group_is_counted_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    engine = fake_engine(fake_config(max_steps=1, per_device_train_batch_size=2), source, fake_rows(2))
    engine.synced(0)
    request = asyncio.create_task(engine.step(1, 0))
    for _ in range(2):
        await settle()
        source.finish(0, [0.0, 0.0])
    await settle()
    assert engine.ledger.summary == {0: {"trained": 0, "dropped": {"zero_variance": 2}}}
    assert "epoch 0 had no usable prompt; dropped: {'zero_variance': 2}" in caplog.text
    assert source.pending[0][0].epoch == 1
    source.finish(0)
    assert await request is not None
    await engine.close()


async def test_an_epoch_of_rejected_prompts_raises() -> None:
    source = FakeSource()
    engine = fake_engine(fake_config(token_budget=2, max_steps=5), source, fake_rows(2))  # no sample fits
    engine.synced(0)
    request = asyncio.create_task(engine.step(1, 0))
    await settle()
    while source.pending:
        source.finish(0)
        await settle()
    with pytest.raises(DatasetError, match=r"every prompt of epoch 0 was rejected.*2 oversize"):
        await request
    await engine.close()


async def test_no_progress_names_the_stage_that_waits() -> None:
    source = FakeSource()
    engine = fake_engine(fake_config(rollout_worker_timeout=0.2), source, fake_rows(2))
    engine.synced(0)
    request = asyncio.create_task(engine.step(1, 0))
    await settle()
    engine.trainer_waits()
    with pytest.raises(NoProgress, match=r"the fake engine holds 2 groups.*4 rollouts outstanding"):
        await request
    await engine.close()


async def test_no_progress_says_when_the_weights_were_never_synced() -> None:
    engine = fake_engine(fake_config(rollout_worker_timeout=0.2), FakeSource(), fake_rows(2))
    request = asyncio.create_task(engine.step(1, 0))
    await settle()
    engine.trainer_waits()
    with pytest.raises(NoProgress, match=r"waits for the trainer to sync weights .the servers hold version none"):
        await request
    await engine.close()


async def test_a_changed_dataset_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    trainer = Trainer(fake_config(), 4, 1, tmp_path)
    trainer.save()
    old, new = trainer.engine.fingerprint, fake_rows(5).fingerprint()
    await trainer.engine.close()
    with pytest.raises(DatasetError) as caught:
        fake_engine(fake_config(), FakeSource(), fake_rows(5), resume=trainer.saved)
    assert old in str(caught.value) and new in str(caught.value)
    engine = fake_engine(fake_config(allow_dataset_change=True), FakeSource(), fake_rows(5), resume=trainer.saved)
    assert engine.ledger.done == 0
    await engine.close()


async def test_the_state_names_everything_the_specification_asks_for(tmp_path: Path) -> None:
    trainer = Trainer(fake_config(per_device_train_batch_size=2), 6, 1, tmp_path)
    await finish_all(trainer)
    await trainer.ask()
    trainer.commit()
    trainer.save()
    state = json.loads((tmp_path / "1" / STATE_FILE).read_text())
    assert {"format", "epoch", "next_index", "done", "dropped", "model_version", "fingerprint", "seed", "rng"} <= state.keys()
    assert (state["epoch"], state["next_index"], state["model_version"], state["step"]) == (0, 1, 1, 1)
    assert (tmp_path / "1" / BUFFER_FILE).exists()
    await trainer.engine.close()
