"""The step engine with a deterministic fake source: resumes, staleness, capacity, end of data, no progress."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeSource, fake_config, fake_engine, fake_rows, settle
from tests.support.trainer_life import Trainer, finish_all, run_out
from trainers.data import Rows
from trainers.errors import ConfigError, DatasetError, NoProgress
from trainers.step_source import BUFFER_FILE, STATE_FILE


@pytest.mark.parametrize("buffered", [True, False])
async def test_a_group_with_a_trained_sample_is_never_generated_again(tmp_path: Path, buffered: bool) -> None:
    """Steps of one sample, groups of two: the checkpoint falls into the middle of a group."""
    config = fake_config(per_device_train_batch_size=1, save_rollout_buffer=buffered, shuffle=False)
    trainer = Trainer(config, fake_rows(3), tmp_path)
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
    trainer = Trainer(config, fake_rows(8), tmp_path)
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


@pytest.mark.parametrize("kept_for", [None, "grpo", "distillation loss=jsd teacher_temperature=1"])
async def test_samples_kept_for_another_objective_are_generated_anew(tmp_path: Path, caplog, kept_for: str | None) -> None:
    """Their likeliest tokens are another model's. None: a checkpoint from before there was a second objective."""
    trainer = Trainer(fake_config(per_device_train_batch_size=2), fake_rows(4), tmp_path)
    await finish_all(trainer)
    trainer.save()
    assert trainer.saved is not None
    file = trainer.saved / STATE_FILE
    state = json.loads(file.read_text())
    assert state.pop("objective") == "grpo"
    file.write_text(json.dumps(state | ({} if kept_for is None else {"objective": kept_for})))
    generated = len(trainer.names)
    await trainer.kill()
    await run_out(trainer)
    other = kept_for not in (None, "grpo")
    generations = {trainer.names[name][2] for step in trainer.trained for name in step}
    assert generated == 8 and len(generations) == 4 and (min(generations) >= 8) == other
    assert trainer.engine.ledger.summary == {0: {"trained": 4, "dropped": {}}}
    assert ("samples kept for distillation loss=jsd teacher_temperature=1 are no samples for grpo" in caplog.text) == other
    await trainer.engine.close()


async def test_the_passes_told_with_a_step_count_what_it_trains_and_at_the_end_all_that_was_dropped(tmp_path: Path) -> None:
    """Steps of two samples, groups of two: a step is a prompt. It is asked for before the one before it is committed."""
    config = fake_config(per_device_train_batch_size=2, shuffle=False, queue_maxsize=8)
    source = FakeSource()
    engine = fake_engine(config, source, fake_rows(4))
    engine.synced(0)
    await settle()
    for _ in range(3):
        source.finish(0)
    source.finish(0, rewards=[1.0, 1.0])  # dropped: its rewards do not differ
    await settle()
    for index in (1, 2, 3):
        step = await engine.step(index, index - 1)
        assert step is not None
        # The dropped one was done before the first step was planned.
        assert engine.passes == pytest.approx((index + 1) / 4) and step.metrics["epoch"] == (engine.passes, 1.0)
        if index > 1:
            engine.committed(index - 1)
    assert engine.passes == 1.0 and engine.ledger.passes() == 0.75
    engine.committed(3)
    assert await engine.step(4, 3) is None and engine.passes == engine.ledger.passes() == 1.0
    await engine.close()


async def test_a_step_that_trains_half_a_group_does_not_count_its_prompt() -> None:
    config = fake_config(per_device_train_batch_size=1, shuffle=False)
    source = FakeSource()
    engine = fake_engine(config, source, fake_rows(2))
    engine.synced(0)
    await settle()
    source.finish(0)
    await settle()
    assert await engine.step(1, 0) is not None and engine.passes == 0.0
    assert await engine.step(2, 1) is not None and engine.passes == 0.5
    await engine.close()


async def test_stale_samples_are_dropped_at_planning_and_do_not_pin_the_resume_position(tmp_path: Path) -> None:
    trainer = Trainer(fake_config(max_staleness=1, per_device_train_batch_size=2, shuffle=False), fake_rows(12), tmp_path)
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


async def test_a_fault_while_a_step_is_made_reaches_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's own work failing must end the wait for it: nothing else would."""
    source = FakeSource()
    engine = fake_engine(fake_config(per_device_train_batch_size=2), source, fake_rows(4))

    def broken(samples: object) -> None:
        raise ArithmeticError("whitening went wrong")

    monkeypatch.setattr(engine.algorithm, "step", broken)
    engine.synced(0)
    waiting = asyncio.create_task(engine.step(1, 0))
    await settle()
    source.finish(0)
    with pytest.raises(ArithmeticError, match="whitening"):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(ArithmeticError, match="whitening"):
        await engine.step(2, 1)
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
    trainer = Trainer(fake_config(), fake_rows(4), tmp_path)
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
    trainer = Trainer(fake_config(per_device_train_batch_size=2), fake_rows(6), tmp_path)
    await finish_all(trainer)
    await trainer.ask()
    trainer.commit()
    trainer.save()
    state = json.loads((tmp_path / "1" / STATE_FILE).read_text())
    assert {"format", "epoch", "next_index", "done", "dropped", "model_version", "fingerprint", "seed", "rng"} <= state.keys()
    assert (state["epoch"], state["next_index"], state["model_version"], state["step"]) == (0, 1, 1, 1)
    assert (tmp_path / "1" / BUFFER_FILE).exists()
    await trainer.engine.close()


async def test_a_state_of_another_format_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(fake_config(), fake_rows(4), tmp_path)
    trainer.save()
    await trainer.engine.close()
    assert trainer.saved is not None
    file = trainer.saved / STATE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    with pytest.raises(ConfigError, match=r"rollout_state\.json has format 1, and this version reads format 2"):
        fake_engine(fake_config(), FakeSource(), fake_rows(4), resume=trainer.saved)


async def test_waiting_samples_are_bounded_in_bytes() -> None:
    """A sample has 3 prompt and 5 sampled tokens of 13 bytes: 104. 500 bytes are reached by the third group of two."""
    source = FakeSource()
    config = fake_config(queue_max_bytes=500, max_staleness=9, per_device_train_batch_size=4)
    engine = fake_engine(config, source, Rows([{"prompt": "p"}] * 100, "equal rows"))
    engine.synced(0)
    await settle(200)
    started = len(source.pending)
    for _ in range(started):
        source.finish(0, lengths=[5, 5])
        await settle()
    assert source.pending == [], "what had started before the bytes were there is taken, and nothing more starts"
    for index in range(1, 10):
        assert source.pending == [], f"{2 * started - 4 * (index - 1)} samples wait"
        step = await engine.step(index, index - 1)
        assert step is not None and step.totals.sequences == 4 and step.totals.forwarded_tokens == 4 * 8
        engine.committed(index)
        engine.synced(index)
        await settle(200)
    assert 2 * started - 4 * 9 == 4 and source.pending, "four samples of 104 bytes leave room"
    await engine.close()


async def test_data_that_ends_with_every_group_dropped_is_a_failure_with_the_counts() -> None:
    source = FakeSource()
    engine = fake_engine(fake_config(per_device_train_batch_size=2), source, fake_rows(3))
    engine.synced(0)
    request = asyncio.create_task(engine.step(1, 0))
    for _ in range(3):
        await settle()
        source.finish(0, [0.0, 0.0])
    with pytest.raises(DatasetError, match=r"all 3 groups were dropped \(3 zero_variance\)"):
        await request
    await engine.close()
