"""Rows of a step over the Unix socket: every rank its own, bounded in bytes, never waited for in vain."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_engine import FakeSource, fake_config, fake_engine, fake_rows, settle
from tests.support.fake_source import make_samples, spread
from trainers.errors import NoProgress, RolloutError, RolloutProcessDied
from trainers.packing import pack_step
from trainers.rollouts import rows
from trainers.rollouts.rows import RowClient, RowServer, socket_folder
from trainers.types import PackedRow, Step

# input_ids, position_ids and five arrays per trained token of 4 bytes each, and what a sample of one token adds.
ROW_TOKEN_BYTES = 7 * 4 + 4


def step_of(index: int, micro: int = 2, ranks: int = 3) -> Step:
    samples = make_samples(seed=1, step=index, count=7)
    for sample in samples[:4]:  # some carry what only some objectives ask for
        sample.top_ids = np.arange(3 * sample.trained_tokens, dtype=np.int32).reshape(-1, 3)
        sample.top_logprobs = -np.ones_like(sample.top_ids, np.float32)
    return pack_step(index, spread(len(samples), micro, ranks), samples, {})


def held_bytes(server: RowServer) -> int:
    held = (row for step in server._steps.values() for microbatch in step.rows for row in microbatch)
    return sum(getattr(row, name).nbytes for row in held for name in PackedRow.FIELDS)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[RowServer, str]]:
    server = RowServer()
    await server.open(folder / "rows")
    try:
        yield server, str(folder / "rows")
    finally:
        await server.close()


async def test_ranks_fetch_their_own_rows_at_the_same_time(tmp_path: Path) -> None:
    step = step_of(4)
    async with serving(tmp_path) as (server, path):
        server.put(step)

        def fetch(rank: int) -> list[PackedRow]:
            client = RowClient(path, 30)
            got = client.fetch(4, rank)
            assert [row.input_ids.tolist() for row in client.fetch(4, rank)] == [row.input_ids.tolist() for row in got]
            client.close()
            return got

        parts = await asyncio.gather(*(asyncio.to_thread(fetch, rank) for rank in range(3)))
    for rank, part in enumerate(parts):
        assert len(part) == 2
        for row, microbatch in zip(part, step.rows, strict=True):
            for name in PackedRow.FIELDS:
                np.testing.assert_array_equal(getattr(row, name), getattr(microbatch[rank], name), strict=True)


async def test_a_step_that_is_not_held_is_an_error_and_the_connection_lives_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, path):
        server.put(step_of(1))
        client = await asyncio.to_thread(RowClient, path, 30)
        with pytest.raises(RolloutError, match=r"rank 0 asked for its rows of step 2; held are \[1\]"):
            await asyncio.to_thread(client.fetch, 2, 0)
        assert len(await asyncio.to_thread(client.fetch, 1, 0)) == 2
        server.committed(1)
        assert held_bytes(server) == 0
        with pytest.raises(RolloutError, match=r"held are \[\]"):
            await asyncio.to_thread(client.fetch, 1, 0)
        client.close()


async def test_a_server_that_closes_ends_its_connections_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (server, path):
        server.put(step_of(1))
        client = await asyncio.to_thread(RowClient, path, 30)
        await asyncio.to_thread(client.fetch, 1, 0)
    await asyncio.sleep(0)  # what asyncio calls back when a connection's task ends
    assert caplog.records == []
    with pytest.raises(RolloutProcessDied):
        await asyncio.to_thread(client.fetch, 1, 0)
    client.close()


async def test_a_third_step_is_never_held(tmp_path: Path) -> None:
    server = RowServer()
    server.put(step_of(1))
    server.put(step_of(2))
    with pytest.raises(AssertionError, match=r"steps \[1, 2, 3\] are held"):
        server.put(step_of(3))


@pytest.mark.parametrize("budget", [7, 12, 40])
async def test_the_rows_of_two_steps_keep_to_the_bound(budget: int) -> None:
    """Full rows of the shortest samples there are, two tokens each of which one is trained, and of long ones."""
    config = fake_config(token_budget=budget, gradient_accumulation_steps=2, max_staleness=9, queue_maxsize=10**4)
    source, server = FakeSource(), RowServer()
    engine = fake_engine(config, source, fake_rows(300), world_size=3)
    engine.synced(0)
    for index in (1, 2):
        request = asyncio.create_task(engine.step(index, index - 1))
        number = 0
        while not request.done():
            await settle()
            if source.pending:
                number += 1
                length = 1 if number % 2 else max(1, budget - 5)
                source.finish(0, [0.0, 1.0], [length, length])
        step = request.result()
        assert step is not None
        server.put(step)
    bound = 2 * 2 * 3 * budget * ROW_TOKEN_BYTES
    # Besides, each row has the one boundary that begins it.
    assert 0 < held_bytes(server) <= bound + 2 * 2 * 3 * 4
    await engine.close()


def test_a_process_that_is_not_there_or_ends_is_named(tmp_path: Path) -> None:
    with pytest.raises(RolloutProcessDied, match="does not listen at"):
        RowClient(str(tmp_path / "rows"), 30)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "rows"))
        listener.listen()
        client = RowClient(str(tmp_path / "rows"), 30)
        ended = listener.accept()[0]
        threading.Timer(0.2, ended.close).start()
        with pytest.raises(RolloutProcessDied, match="ended while rank 1 fetched its rows of step 7"):
            client.fetch(7, 1)
        client.close()


def test_half_an_answer_and_silence_are_no_progress(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "rows"))
        listener.listen()
        client = RowClient(str(tmp_path / "rows"), 0.3)
        with listener.accept()[0] as silent:
            silent.sendall(b"\x40\x00\x00\x00half a header")
            with pytest.raises(NoProgress, match="said nothing for 0 s while rank 2 fetched rows of step 7"):
                client.fetch(7, 2)
        client.close()


async def test_another_users_process_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (server, path):
        server.put(step_of(1))
        client = await asyncio.to_thread(RowClient, path, 30)
        monkeypatch.setattr(rows, "same_user", lambda sock: False)
        with pytest.raises(RolloutError, match="another user's"):
            await asyncio.to_thread(RowClient, path, 30)
        refused = await asyncio.to_thread(socket.socket, socket.AF_UNIX)
        await asyncio.to_thread(refused.connect, path)
        assert await asyncio.to_thread(refused.recv, 1) == b"", "the server closed the connection"
        refused.close()
        client.close()


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    assert rows.same_user(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        assert not rows.same_user(ours)
    ours.close()
    theirs.close()


def test_a_folder_with_a_long_path_is_not_used_for_the_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    folder = socket_folder(long)
    assert folder != long and len(os.fsencode(folder / "rows")) <= 100 and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    assert socket_folder(Path("/tmp")) == Path("/tmp")
