"""Datasets read as a stream: opening, reading ahead, coming back to where a checkpoint was, failures."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeSource, fake_config, fake_engine, settle
from tests.support.streams import Counted, Plain
from tests.support.trainer_life import Trainer, finish_all, run_out
from trainers.config_parts import DatasetConfig, EvalConfig
from trainers.data import as_data, check_columns, load_data
from trainers.errors import ConfigError, DatasetError, NoProgress
from trainers.rollouts import reading
from trainers.rollouts.reading import StreamReader
from trainers.streams import Stream

datasets = pytest.importorskip("datasets")


def stream(rows: Any, **options: Any) -> Stream:
    made = as_data(rows, "the stream", **options)
    assert isinstance(made, Stream)
    return made


def all_rows(made: Stream, epoch: int = 0) -> list[dict[str, Any]]:
    return list(made.rows(made.open(epoch), epoch))


def records(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]


def trained_rows(trainer: Trainer) -> list[tuple[int, int]]:
    return sorted({trainer.names[name][:2] for step in trainer.trained for name in step})


def test_every_file_and_a_saved_folder_stream_the_rows_they_hold(tmp_path: Path) -> None:
    rows = records(7)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    for name in ("a.jsonl", "a.json", "a.parquet", "folder"):
        made = load_data(DatasetConfig(path=str(tmp_path / name), streaming=True))
        assert isinstance(made, Stream) and made.stateful
        assert all_rows(made) == rows == all_rows(made, epoch=1) and made.columns == ["prompt", "answer"]
        assert len(all_rows(load_data(DatasetConfig(path=str(tmp_path / name), streaming=True, max_rows=3)))) == 3  # type: ignore[arg-type]


def test_what_cannot_be_streamed_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"there is no file .*gone\.jsonl"):
        load_data(DatasetConfig(path=str(tmp_path / "gone.jsonl"), streaming=True))
    with pytest.raises(DatasetError, match="the stream has no rows"):
        stream(Plain(0))
    with pytest.raises(DatasetError, match="is a generator, which can be read only once"):
        stream(row for row in records(2))
    with pytest.raises(DatasetError, match="row 0: a str, but every row must be a dict"):
        stream(Words())
    with pytest.raises(DatasetError, match=r"the stream has no column `question`; it has: prompt, answer"):
        check_columns(stream(Plain(2)), fake_config(dataset={"path": "x", "prompt_column": "question"}))
    with pytest.raises(TypeError, match="the stream cannot be handed to the process that reads it"):
        stream(datasets.IterableDataset.from_generator(lambda: iter(records(2))))
    with pytest.raises(DatasetError, match="without a length"):
        as_data(7, "train_dataset")
    with pytest.raises(ValueError, match="read whole"):
        EvalConfig(dataset=DatasetConfig(path="x", streaming=True))


class Words:
    def __iter__(self) -> Iterator[Any]:
        return iter(["a", "b"])


def test_the_fingerprint_is_that_of_the_first_rows() -> None:
    prints = {stream(rows).fingerprint() for rows in (Plain(3), Plain(4), Counted(3))}
    assert len(prints) == 2, "of two equal streams and one that is longer"
    assert stream(Plain(3), max_rows=2).fingerprint() not in prints
    assert stream(Plain(10**9)).fingerprint() == stream(Plain(10**6)).fingerprint(), "it ends after its first rows"


async def test_fractions_of_an_unknown_length_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_train_epochs=1\.5: how long a stream is shows only at its end"):
        fake_engine(fake_config(num_train_epochs=1.5), FakeSource(), stream(Plain(3)))


@pytest.mark.parametrize("kind", ["jsonl", "generator", "shards", "counted"])
async def test_a_resumed_stream_gives_what_is_not_done_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Killed in its second epoch, with rows done beyond the first pending one, between two marks."""
    monkeypatch.setattr(reading, "MARK_EVERY", 4)
    rows = records(11)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    made = {
        "jsonl": lambda: load_data(DatasetConfig(path=str(tmp_path / "a.jsonl"), streaming=True)),
        "generator": lambda: stream(datasets.IterableDataset.from_generator(records, gen_kwargs={"count": 11})),
        "shards": lambda: stream(datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)),
        "counted": lambda: stream(Counted(11)),
    }[kind]()
    config = fake_config(num_train_epochs=3, per_device_train_batch_size=4, save_rollout_buffer=False)
    trainer = Trainer(config, made, tmp_path / "saves")
    for _ in range(9):  # of 17 steps of two groups
        for _ in range(2):
            await trainer.settle()
            trainer.source.finish(0)
        await trainer.ask()
        trainer.commit()
    await trainer.settle()
    trainer.source.finish(2, [1.0, 1.0])  # dropped: counted beyond those still in flight
    await trainer.settle()
    state = trainer.save()
    assert state["epoch"] == 1 and state["done"]["1"], "nothing is done beyond the first pending row"
    mark = state["stream"]["1"]["position"]
    assert 0 < mark <= state["next_index"] and mark % 4 == 0
    assert state["prompts"] is None and state["length"] == 11
    await trainer.kill()
    await run_out(trainer)
    await trainer.engine.close()
    summary = trainer.engine.ledger.summary
    assert [summary[epoch]["trained"] for epoch in range(3)] == [11, 10, 11]
    assert len(trained_rows(trainer)) == 32 and len([n for step in trainer.trained for n in step]) == 64


async def test_a_shuffle_buffer_is_read_again_from_the_epochs_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content is not part of the dataset's state, which alone would lose the rows in it; each epoch has its own order."""
    monkeypatch.setattr(reading, "MARK_EVERY", 4)
    made = stream(datasets.Dataset.from_list(records(20)).to_iterable_dataset().shuffle(seed=3, buffer_size=6))
    orders = [[row["prompt"] for row in all_rows(made, epoch)] for epoch in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) != orders[0]
    config = fake_config(num_train_epochs=2, per_device_train_batch_size=4, save_rollout_buffer=False)
    trainer = Trainer(config, made, tmp_path)
    prompts: list[str] = []

    async def step() -> None:
        await trainer.settle()
        while trainer.source.pending:
            prompts.append(str(trainer.source.pending[0][0].columns["answer"]))
            trainer.source.finish(0)
            await trainer.settle()
        await trainer.ask()
        trainer.commit()

    for _ in range(4):
        await step()
    assert trainer.save()["stream"]["0"]["position"] == 8
    del prompts[8:]  # what was generated beyond is lost with the process
    await trainer.kill()
    while not trainer.done:
        await step()
    await trainer.engine.close()
    assert "holds no shuffle buffer" in caplog.text
    assert [f"p{answer}" for answer in prompts] == orders[0] + orders[1]
    assert {epoch: counts["trained"] for epoch, counts in trainer.engine.ledger.summary.items()} == {0: 20, 1: 20}


class Unsteady(Counted):
    """Another order in every pass but for the first rows; its state leads nowhere."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = records(self.count)
        tail = rows[40:]
        random.shuffle(tail)
        yield from rows[:40] + tail


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_stream_that_cannot_be_found_again_is_refused_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    monkeypatch.setattr(reading, "MARK_EVERY", 50)
    made = stream(Unsteady(2000))
    reader = StreamReader(made)
    for position in range(60):
        await reader.row(0, position)
    state = reader.state_dict({0: 60})
    reader.close()
    again = StreamReader(made, tolerant=allowed)
    again.load_state_dict(json.loads(json.dumps(state)))
    if allowed:
        assert await again.row(0, 60) is not None and "may be trained twice" in caplog.text
    else:
        with pytest.raises(DatasetError, match=r"does not give the rows of epoch 0 in the same order again: row 50"):
            await again.row(0, 60)
    again.close()


async def test_a_stream_without_a_state_begins_its_epoch_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = fake_config(num_train_epochs=2, per_device_train_batch_size=4)
    trainer = Trainer(config, stream(Plain(6)), tmp_path)
    for _ in range(4):  # three steps are an epoch
        await finish_all(trainer)
        await trainer.ask()
        trainer.commit()
    state = trainer.save()
    assert (state["epoch"], state["next_index"]) == (1, 2)
    await trainer.kill()
    assert "the stream has no state_dict() to go on from: epoch 1 is read from prompt 0 again" in caplog.text
    await trainer.settle()
    assert trainer.source.pending[0][0].id == "1:0"
    await run_out(trainer)
    await trainer.engine.close()
    assert trainer.engine.ledger.summary == {epoch: {"trained": 6, "dropped": {}} for epoch in (0, 1)}
    assert len(trainer.trained) == 4 + 3, "the first step of the second epoch was made twice"


async def test_a_changed_stream_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(fake_config(), stream(Plain(4)), tmp_path)
    trainer.save()
    await trainer.engine.close()
    with pytest.raises(DatasetError, match="the stream changed"):
        fake_engine(fake_config(), FakeSource(), stream(Plain(5)), resume=trainer.saved)


class Gated(Plain):
    """Gives `free` rows at once and the others when `gate` opens; `given` counts over all copies."""

    gate = threading.Event()
    given = 0

    def __init__(self, count: int, free: int, fails: bool = False) -> None:
        super().__init__(count)
        self.free, self.fails = free, fails

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, row in enumerate(super().__iter__()):
            if i >= self.free:
                if self.fails:
                    raise OSError("the line is down")
                Gated.gate.wait(30)
            type(self).given += 1
            yield row


class Endless(Gated):
    """Counts apart from readers that other tests left behind."""

    given = 0


async def test_a_stream_that_waits_stops_nothing_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gated, "gate", threading.Event())
    config = fake_config(rollout_worker_timeout=0.3, per_device_train_batch_size=8, max_staleness=1)
    source = FakeSource()
    # The first rows are read before anything starts.
    monkeypatch.setattr("trainers.streams.FINGERPRINT_ROWS", 1)
    engine = fake_engine(config, source, stream(Gated(9, free=1)))
    engine.synced(0)
    while not source.pending:
        await asyncio.sleep(0.001)
    source.finish(0)
    request = asyncio.create_task(engine.step(1, 0))
    await settle()
    engine.trainer_waits()
    with pytest.raises(NoProgress, match="reading waits for row 1 of epoch 0 of the stream"):
        await request
    Gated.gate.set()
    await engine.close()


async def test_reading_stays_a_bounded_number_of_rows_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endless, "given", 0)
    made = stream(Endless(10**9, free=10**9))
    made.fingerprint()
    before = Endless.given
    reader = StreamReader(made)
    for position in range(5):
        await reader.row(0, position)
    deadline = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    assert Endless.given - before == 5 + reading.AHEAD
    reader.close()


async def test_a_stream_that_fails_in_mid_read_says_where() -> None:
    config = fake_config(per_device_train_batch_size=100, max_staleness=9, queue_maxsize=10**6)
    source = FakeSource(delay_s=0.0)
    engine = fake_engine(config, source, stream(Gated(90, free=40, fails=True)))
    engine.synced(0)
    with pytest.raises(DatasetError, match=r"the stream could not be read on at row 40 of epoch 0: OSError: the line is down"):
        await engine.step(1, 0)
    await engine.close()


async def test_a_stream_that_gives_nothing_the_second_time_ends_the_run() -> None:
    source = FakeSource(delay_s=0.0)
    engine = fake_engine(fake_config(max_steps=9, per_device_train_batch_size=2), source, stream(OnlyOnce()))
    engine.synced(0)
    with pytest.raises(DatasetError, match=r"gave no rows in epoch 1: can it be read more than once\?"):
        for index in range(1, 9):
            assert await engine.step(index, index - 1) is not None
            engine.committed(index)
            engine.synced(index)
    await engine.close()


class OnlyOnce(Plain):
    def __init__(self) -> None:
        super().__init__(2)

    def set_epoch(self, epoch: int) -> None:
        self.count = 0 if epoch else 2


async def test_memory_follows_what_is_under_way_not_what_was_read() -> None:
    """An endless stream: of 3,000 prompts that were trained the ledger and the reader hold what is under way."""
    source = FakeSource(delay_s=0.0)
    engine = fake_engine(fake_config(max_steps=10**6, per_device_train_batch_size=100), source, stream(Counted(10**9)))
    engine.synced(0)
    sizes = []
    for index in range(1, 61):
        assert await engine.step(index, index - 1) is not None
        engine.committed(index)
        engine.synced(index)
        assert engine.reader is not None
        engine.reader.forget(engine.ledger.needed())
        sizes.append((len(engine.ledger._open[0].states), sum(map(len, engine.reader._marks.values()))))
    assert engine.ledger.done == 60 * 50 and engine.ledger.passes() == 0.0
    assert max(size for size, _ in sizes) <= 600  # a few steps' prompts, of 50 each
    assert max(marks for _, marks in sizes) <= 8
    state = json.dumps(engine.snapshot()[0])
    assert len(state) < 4000, state
    await engine.close()


def test_a_pass_leaves_the_dataset_as_it_was() -> None:
    given = Counted(5)
    before = dict(vars(given))
    made = stream(given)
    assert len(all_rows(made)) == 5 and made.fingerprint() and vars(given) == before
