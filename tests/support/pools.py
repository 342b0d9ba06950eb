"""Server pools over stubs, for tests of what a pool does with its servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from tests.support.stub_server import StubServer
from trainers.rollouts.pool import Lease, ServerPool
from trainers.types import TurnRecord

PROMPT = np.array([2, 60, 3], np.int32)


@asynccontextmanager
async def pool_of(
    *stubs: StubServer, budget_s: float = 30, ceiling: int = 100, **options: Any
) -> AsyncIterator[tuple[ServerPool, list[str]]]:
    """An open pool over running stubs, and the causes of its retries as they come."""
    retries: list[str] = []
    options = {"first_pause_s": 0.01, "look_every_s": 0.02} | options
    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub.run())
        pool = ServerPool([stub.url for stub in stubs], budget_s, ceiling, on_retry=retries.append, **options)
        try:
            await pool.open(5)
            yield pool, retries
        finally:
            await pool.close()


async def one_turn(pool: ServerPool, lease: Lease | None = None, version: int | None = 7) -> TurnRecord:
    held = lease or pool.lease()
    try:
        return await pool.turn(PROMPT, lease=held, temperature=1.0, max_tokens=8, seed=5, version=lambda: version)
    finally:
        if lease is None:
            pool.release(held)


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
