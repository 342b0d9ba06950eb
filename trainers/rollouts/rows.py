"""Packed rows from the rollout process to the trainer ranks of its node: every rank fetches its own, as raw arrays.

    rank 0 ══ Channel ══▶ step i: totals, metrics            RowServer (rollout process): keeps step i until it is committed
    rank r ── Unix socket: {"index": i, "rank": r} ─────────▶   └─▶ the rank's rows, one per micro-batch

Invariants:
- rows never pass through rank 0 on their way to another rank of the node, and nothing is pickled;
- at most two steps are held: the one that trains and the one planned ahead. That is at most 2 × gradient_accumulation_steps ×
  ranks × (tokens of a row) × 32 bytes; each of the sampler's top logprobs or candidates adds 8 bytes per token;
- the socket lies in a folder of mode 0700, and both ends check that the other one is of the same user;
- a fetch ends: the process gone is `RolloutProcessDied`, silence for `timeout_s` is `NoProgress`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
from pathlib import Path

from trainers.errors import NoProgress, RolloutError, RolloutProcessDied
from trainers.packing import rows_from_wire, rows_to_wire
from trainers.rollouts.channel import AsyncChannel, Channel, Message
from trainers.types import PackedRow, Step

_LONGEST_PATH = 100  # bytes; the kernel's limit for a socket's is 108


def socket_folder(private: Path) -> Path:
    """A folder of mode 0700 whose path is short enough for a socket: `private` itself, or a new one in /tmp."""
    if len(os.fsencode(private / "rows")) <= _LONGEST_PATH:
        return private
    return Path(tempfile.mkdtemp(prefix="loopwright-rows-", dir="/tmp"))


def same_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user. True where the kernel cannot tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.getuid()


class RowServer:
    """The rollout process's end."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._connected, path, limit=2**22)

    def put(self, step: Step) -> None:
        """Keep a step's rows until `committed`."""
        self._steps[step.index] = step
        assert len(self._steps) <= 2, f"steps {sorted(self._steps)} are held; one trains and one may be planned ahead"

    def committed(self, index: int) -> None:
        self._steps.pop(index, None)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()  # ends its task; asyncio before Python 3.12 reports one that is cancelled as a fault
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)
        channel = AsyncChannel(reader, writer)
        try:
            if same_user(writer.get_extra_info("socket")):
                while True:
                    await self._answer(channel, await channel.recv())
        except (EOFError, ConnectionError):
            pass  # the rank is gone; its trainer knows why
        finally:
            channel.close()

    async def _answer(self, channel: AsyncChannel, request: Message) -> None:
        index, rank = request.fields["index"], request.fields["rank"]
        step = self._steps.get(index)
        if step is None:
            message = f"rank {rank} asked for its rows of step {index}; held are {sorted(self._steps)}"
            await channel.send(Message("error", {"message": message}))
            return
        rows = [microbatch[rank] for microbatch in step.rows]
        await channel.send(Message("rows", {"count": len(rows)}, rows_to_wire(rows)))


class RowClient:
    """A rank's end.

    Args:
        path: of the server's socket.
        timeout_s: longest silence while rows are fetched.

    Raises:
        RolloutProcessDied: nobody listens there.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise RolloutProcessDied(f"the rollout process does not listen at {path}: {error}") from error
        if not same_user(sock):
            sock.close()
            raise RolloutError(f"the process that listens at {path} is another user's")
        self._channel = Channel(sock, timeout_s)

    def fetch(self, index: int, rank: int) -> list[PackedRow]:
        """The rank's rows of step `index`, one per micro-batch; views of the received bytes.

        Raises:
            RolloutProcessDied: the process ended.
            NoProgress: it says nothing.
        """
        try:
            self._channel.send(Message("rows", {"index": index, "rank": rank}))
            answer = self._channel.recv()
        except (EOFError, ConnectionError) as error:
            raise RolloutProcessDied(f"the rollout process ended while rank {rank} fetched its rows of step {index}") from error
        except TimeoutError as error:
            raise NoProgress(
                f"the rollout process said nothing for {self._timeout_s:.0f} s while rank {rank} fetched rows of step {index}"
            ) from error
        if answer.type == "error":
            raise RolloutError(answer.fields["message"])
        return rows_from_wire(answer.arrays, answer.fields["count"])

    def close(self) -> None:
        self._channel.close()
