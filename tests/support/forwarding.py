"""Connections on a fixed port, where a script without settings looks for its server, passed on to a server of the tests."""

import asyncio
import contextlib
import socket
import threading

import httpx
import pytest


@contextlib.contextmanager
def forwarded_from_port_8000(url):
    """Passes connections on localhost:8000, where a script without settings looks for its server, to `url`."""
    target = httpx.URL(url)

    async def pump(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connected(reader, writer):
        there = await asyncio.open_connection(target.host, target.port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async def serve():
        server = await asyncio.start_server(connected, sock=listener, backlog=512)
        async with server:
            started.set()
            await asyncio.to_thread(stop.wait)

    try:
        listener = socket.create_server(("127.0.0.1", 8000))
    except OSError as error:
        pytest.skip(f"port 8000 is taken on this machine: {error}")
    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
