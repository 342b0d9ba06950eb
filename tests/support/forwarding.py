"""Connections on a port of choice passed on to a server of the tests: where a script without settings looks for its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


@asynccontextmanager
async def forwarding(url: str, port: int) -> AsyncIterator[str]:
    """The address on localhost at which `url` is found as well."""
    target = urlsplit(url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port, backlog=512) as server:
        yield f"http://localhost:{server.sockets[0].getsockname()[1]}"
