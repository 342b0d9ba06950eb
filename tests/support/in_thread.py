"""A server on an event loop and a thread of its own, because the trainer's side of a test blocks; and the port it can have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


@contextmanager
def in_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """What the server gives once it is up. Raises what its start raises."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as running:
        yield running


def port_or_any(port: int) -> int:
    """`port`; 0, which is any that is free, where another program of this machine has it."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return port
    except OSError:
        return 0
