"""Where users' tools and environments run, away from the loop that generates.

    generating loop ─▶ call ─┬▶ threads (synchronous functions)
                             └▶ an event loop in a thread of its own (asynchronous ones)

Invariants:
- nothing a function does holds up or ends generation: neither blocking, nor `sys.exit`, nor cancelling itself;
- a call ends within `limit_s`: one that does not is given up, and its thread is lost to the pool until it returns.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class CallTimeout(Exception):
    """A function did not return in time."""


# What a function raises crosses as a value: asyncio takes SystemExit, StopIteration and cancellation as meant for itself.


def _outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


def _unpacked(outcome: tuple[Any, BaseException | None]) -> Any:
    value, error = outcome
    if error is None:
        return value
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{type(error).__name__}: {error}") from error


class SideCalls:
    """Threads and an event loop for functions of the user's, both started when first needed.

    Args:
        threads: synchronous calls at once.
        limit_s: seconds a call may take, waiting for a thread included.
    """

    def __init__(self, threads: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self.pending = 0  # calls that have not returned
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tool")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What `function` returns.

        Raises:
            CallTimeout: it did not return within `limit_s`.
        """
        return await self.call_within(self.limit_s, function, *args, **kwargs)

    async def call_within(self, limit_s: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `call`, with a limit of its own."""
        self.pending += 1
        try:
            async with asyncio.timeout(limit_s) as limit:
                if inspect.iscoroutinefunction(function):
                    result: Any = function(*args, **kwargs)
                else:
                    loop = asyncio.get_running_loop()
                    result = _unpacked(await loop.run_in_executor(self._threads, _outcome, function, args, kwargs))
                # A synchronous function may give a coroutine too: a partial, or an object whose `__call__` is asynchronous.
                return _unpacked(await self._await(_awaited(result))) if inspect.iscoroutine(result) else result
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise CallTimeout(f"{name} did not return within {limit_s:.0f} s") from error
        finally:
            self.pending -= 1

    async def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="async tools", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    def close(self) -> None:
        """Take no further calls. One that still runs is left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1)
