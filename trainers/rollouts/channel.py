"""Messages between the trainer and the rollout process: a JSON header and raw NumPy arrays over a stream socket, no pickle.

    frame = uint32 header length │ header JSON {"type", "fields", "arrays": [[name, dtype, shape], …]} │ array bytes

Every array's bytes are filled up to a multiple of 8, so that received arrays are aligned views of one buffer. A closed socket
is the sign that the other side is gone: `recv` raises `EOFError`.
"""

from __future__ import annotations

import asyncio
import json
import math
import select
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 8


@dataclass(slots=True)
class Message:
    """One message: `fields` is JSON, `arrays` travel as raw bytes."""

    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def encode(message: Message) -> list[bytes | memoryview]:
    """The frame as buffers to be written one after another; arrays are not copied if contiguous."""
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"type": message.type, "fields": message.fields, "arrays": layout}).encode()
    parts: list[bytes | memoryview] = [_LENGTH.pack(len(header)) + header]
    for array in arrays.values():
        if array.size:
            parts.append(array.reshape(-1).view(np.uint8).data)
        if fill := -array.nbytes % _ALIGNMENT:
            parts.append(bytes(fill))
    return parts


def _padded_bytes(dtype: str, shape: list[int]) -> int:
    count = np.dtype(dtype).itemsize * math.prod(shape)
    return count + -count % _ALIGNMENT


def _array_bytes(header: dict[str, Any]) -> int:
    return sum(_padded_bytes(dtype, shape) for _, dtype, shape in header["arrays"])


def decode(header: dict[str, Any], body: bytes | bytearray) -> Message:
    """The message of a frame; its arrays are views of `body`."""
    arrays, offset = {}, 0
    for name, dtype, shape in header["arrays"]:
        count = math.prod(shape)
        arrays[name] = (
            np.frombuffer(body, dtype=dtype, count=count, offset=offset).reshape(shape) if count else np.zeros(shape, dtype)
        )
        offset += _padded_bytes(dtype, shape)
    return Message(header["type"], header["fields"], arrays)


class Channel:
    """The blocking end (trainer side). One thread uses it at a time. `TimeoutError`: nothing moved for `timeout_s` seconds."""

    def __init__(self, sock: socket.socket, timeout_s: float | None = None) -> None:
        self._socket = sock
        self._socket.settimeout(timeout_s)

    def send(self, message: Message) -> None:
        """Raises `BrokenPipeError` or `ConnectionResetError` when the other side is gone."""
        for part in encode(message):
            self._socket.sendall(part)

    def wait(self, timeout_s: float) -> bool:
        """Whether something can be read (a message, or the end) within `timeout_s`."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def recv(self) -> Message:
        """Block for the next message. Raises `EOFError` when the other side closed."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        header = json.loads(self._exactly(length))
        return decode(header, self._exactly(_array_bytes(header)))

    def _exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            try:
                got = self._socket.recv_into(view[done:])
            except ConnectionResetError as error:
                raise EOFError("channel reset by the other side") from error
            if got == 0:
                raise EOFError("channel closed by the other side")
            done += got
        return buffer

    def close(self) -> None:
        self._socket.close()


class AsyncChannel:
    """The asyncio end (rollout process side)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._sending = asyncio.Lock()

    @classmethod
    async def open(cls, sock: socket.socket) -> AsyncChannel:
        return cls(*await asyncio.open_connection(sock=sock, limit=2**22))

    async def send(self, message: Message) -> None:
        async with self._sending:
            for part in encode(message):
                self._writer.write(part)
                await self._writer.drain()  # one array at a time: what the other side has not read is not copied ahead

    async def recv(self) -> Message:
        """Raises `EOFError` when the other side closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            header = json.loads(await self._reader.readexactly(length))
            return decode(header, await self._reader.readexactly(_array_bytes(header)))
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise EOFError("channel closed by the other side") from error

    def close(self) -> None:
        self._writer.close()
