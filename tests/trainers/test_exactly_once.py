"""Exactly once, under any interleaving of generation, drops, training, checkpoints and kills; for datasets and for streams."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fake_engine import fake_config, fake_rows
from tests.support.streams import Counted
from tests.support.trainer_life import Trainer, run_out
from trainers.data import as_data
from trainers.rollouts import reading

REWARDS = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0], []]
LENGTHS = [[3, 3], [3, 3], [1, 5], [2, 40], [0, 2]]
ACTIONS = ["finish", "finish", "finish", "ask", "commit", "step", "step", "save", "kill", "save and kill", "kill far"]


def drawn_config(draw: Any, streams: bool) -> Any:
    return fake_config(
        num_train_epochs=draw(st.sampled_from([1.0, 2.0, 3.0] if streams else [1.0, 1.5, 2.0, 3.0]), label="epochs"),
        per_device_train_batch_size=draw(st.sampled_from([1, 1, 2, 3]), label="row samples"),
        gradient_accumulation_steps=draw(st.integers(1, 2)),
        token_budget=draw(st.sampled_from([0, 0, 12, 30])),
        max_staleness=draw(st.sampled_from([4, 2, 1, 0]), label="staleness"),
        queue_maxsize=draw(st.sampled_from([1, 3, 64])),
        queue_max_bytes=draw(st.sampled_from([1, 200, 2**31])),
        save_rollout_buffer=draw(st.booleans()),
        rollout_worker_timeout=1000,
    )


async def one_action(trainer: Trainer, action: str, draw: Any) -> None:
    if action in ("finish", "step") and trainer.source.pending:
        position = draw(st.integers(0, len(trainer.source.pending) - 1))
        rewards = draw(st.sampled_from(REWARDS))
        trainer.source.finish(position, rewards, draw(st.sampled_from(LENGTHS))[: len(rewards)])
        await trainer.settle()
    if action in ("ask", "step"):
        await trainer.ask()
    if action in ("commit", "step"):
        trainer.commit()
    if "save" in action:
        trainer.save()
    if "kill" in action:
        await trainer.kill(draw(st.integers(0, len(trainer.saves) - 1)) if "far" in action else -1)


def check_end(trainer: Trainer, prompts: int) -> None:
    """Every prompt of every epoch is counted once, and what was trained is what the ledger says."""
    ledger, epochs = trainer.engine.ledger, trainer.config.num_train_epochs
    sizes = {epoch: min(prompts, int(epochs * prompts + 0.5) - epoch * prompts) for epoch in range(-int(-epochs // 1))}
    totals = {epoch: counts["trained"] + sum(counts["dropped"].values()) for epoch, counts in ledger.summary.items()}
    assert totals == sizes
    names = [name for step in trainer.trained for name in step]
    assert len(names) == len(set(names)), "a sample was trained twice"
    trained = [(epoch, row) for epoch, row, _ in {trainer.names[name] for name in names}]
    assert len(trained) == len(set(trained)), "two generations of one prompt were trained in an epoch"
    for epoch, counts in ledger.summary.items():
        assert counts["trained"] == sum(key[0] == epoch for key in trained)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_exactly_once_under_any_interleaving(data: st.DataObject) -> None:
    draw = data.draw
    streams = draw(st.booleans(), label="stream")
    prompts = draw(st.sampled_from([1, 3, 6, 9]), label="prompts")
    config = drawn_config(draw, streams)
    rows = as_data(Counted(prompts), "a stream") if streams else fake_rows(prompts)

    async def scenario(folder: Path) -> None:
        trainer = Trainer(config, rows, folder, draw(st.integers(1, 2)))
        for _ in range(draw(st.integers(4, 40), label="actions")):
            await trainer.settle()
            await one_action(trainer, draw(st.sampled_from(ACTIONS)), draw)
        # From here on everything goes well; it must come to an end.
        await asyncio.wait_for(run_out(trainer), 60)
        await trainer.engine.close()
        check_end(trainer, prompts)

    every, reading.MARK_EVERY = reading.MARK_EVERY, draw(st.sampled_from([1, 2, 64]), label="rows between marks")
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(scenario(Path(folder)))
    finally:
        reading.MARK_EVERY = every


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_epoch_of_drops_only_ends_like_any_other(data: st.DataObject) -> None:
    """The first epoch gives nothing: every group fails or has equal rewards, wherever the run is killed in it."""
    draw = data.draw
    streams, prompts = draw(st.booleans()), draw(st.integers(1, 5))
    config = fake_config(num_train_epochs=2, per_device_train_batch_size=2, rollout_worker_timeout=1000)
    rows = as_data(Counted(prompts), "a stream") if streams else fake_rows(prompts)

    async def scenario(folder: Path) -> None:
        trainer = Trainer(config, rows, folder)
        for _ in range(4 * prompts):
            await trainer.settle()
            first = [i for i, (prompt, _) in enumerate(trainer.source.pending) if prompt.epoch == 0]
            if not first:
                break
            trainer.source.finish(draw(st.sampled_from(first)), draw(st.sampled_from([[], [1.0, 1.0], [0.0, 0.0]])))
            await trainer.settle()
            if draw(st.integers(0, 3)) == 0:
                trainer.save()
                await trainer.kill()
        await asyncio.wait_for(run_out(trainer), 60)
        await trainer.engine.close()
        check_end(trainer, prompts)
        assert trainer.engine.ledger.summary[0]["trained"] == 0 and trainer.engine.ledger.summary[1]["trained"] == prompts

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
