"""The rollout process: `python -m trainers.rollouts.main --fd N CONFIG.json [PAYLOAD]`.

    trainer rank 0 ══ socket pair ══▶ start, request, waiting, committed, servers, synced, snapshot, close
                   ◀═════════════════ info, step, snapshot, error, alive (every 2 s)
    every rank     ══ Unix socket ═══▶ its own rows of a step (`rows.RowServer`)

It lives as long as the trainer: a closed socket ends it, a thread of its own sees to that even when the event loop is busy, and
on Linux the kernel does so even when a reward function never lets go of the interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from pydantic import TypeAdapter

from trainers.config import SFTConfig, TrainerConfig, TrainerConfigUnion
from trainers.errors import users_part
from trainers.packing import head_to_wire
from trainers.rollouts.blame import user_traceback
from trainers.rollouts.build import build_engine
from trainers.rollouts.channel import AsyncChannel, Message
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.payload import Payload, read_payload
from trainers.rollouts.rows import RowServer
from trainers.rollouts.snapshot import write_snapshot

ALIVE_EVERY_S = 2.0


class Server:
    """Answers the trainer's messages."""

    def __init__(self, channel: AsyncChannel, config: TrainerConfig, payload: Payload) -> None:
        self._channel, self._config, self._payload = channel, config, payload
        self._engine: StepEngine | None = None
        self._rows = RowServer()
        self._stage = "starting"  # until there is an engine to ask
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        alive = asyncio.create_task(self._say_alive())
        try:
            while True:
                message = await self._channel.recv()
                if message.type == "close":
                    return
                await self._handle(message)
        except EOFError:
            return
        except Exception as error:
            await self._report(error)
        finally:
            alive.cancel()
            await self._rows.close()
            if self._engine is not None:
                await self._engine.close()

    async def _handle(self, message: Message) -> None:
        fields = message.fields
        if message.type == "start":
            await self._rows.open(Path(fields["rows"]))
            engine, info = await build_engine(
                self._config,
                self._payload,
                version=fields["version"],
                resume_step=fields["resume_step"],
                resume_dir=None if fields["resume_dir"] is None else Path(fields["resume_dir"]),
                world_size=fields["world_size"],
                say=self._say,
            )
            self._engine = engine
            engine.start()
            await self._channel.send(Message("info", info))
            return
        engine = self._engine
        assert engine is not None, f"{message.type} before start"
        if message.type == "request":
            task = asyncio.create_task(self._step(engine, fields["index"], fields["train_version"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # the request is open before the next message is read
        elif message.type == "waiting":
            engine.trainer_waits()
        elif message.type == "committed":
            self._rows.committed(fields["index"])
            engine.committed(fields["index"])
        elif message.type == "synced":
            engine.synced(fields["version"], fields["served_as"])
        elif message.type == "servers":
            engine.servers([(server["name"], server["url"]) for server in fields["servers"]])
        elif message.type == "snapshot":
            snapshot = engine.snapshot()
            await asyncio.to_thread(write_snapshot, Path(fields["directory"]), snapshot)
            await self._channel.send(Message("snapshot", {"state": snapshot.state}))
        else:
            raise AssertionError(f"unknown message {message.type!r}")

    async def _step(self, engine: StepEngine, index: int, train_version: int) -> None:
        try:
            step = await engine.step(index, train_version)
            rows = engine.drain_rows()
            if step is None:
                head = None
            else:
                self._rows.put(step)
                head = head_to_wire(step)
            await self._channel.send(Message("step", {"step": head, "rows": rows, "passes": engine.passes}))
        except Exception as error:
            await self._report(error)

    async def _report(self, error: Exception) -> None:
        trace = users_part(error) or user_traceback(error)
        await self._channel.send(Message("error", {"class": type(error).__name__, "message": str(error), "traceback": trace}))

    def _say(self, stage: str) -> None:
        """What the start is doing now."""
        self._stage = stage

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            await self._channel.send(Message("alive", {"doing": self._engine.describe() if self._engine else self._stage}))


def _die_with(parent: int) -> None:
    """Exit within seconds of the trainer's death, whatever the event loop is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(3)

    threading.Thread(target=watch, name="watch trainer", daemon=True).start()


async def _amain(fd: int, config: TrainerConfig, payload: Payload) -> None:
    channel = await AsyncChannel.open(socket.socket(fileno=fd))
    await Server(channel, config, payload).serve()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rollout process; started by the trainer, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the trainer")
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    parser.add_argument("config", type=Path, help="resolved trainer config, JSON")
    parser.add_argument("payload", type=Path, nargs="?", help="Python objects of the user's")
    args = parser.parse_args(argv)
    _die_with(args.parent)
    # Signals to the whole process group are for the trainer to answer, which still wants a snapshot from here. A function
    # rather than SIG_IGN, because the latter would be inherited by what reward functions start.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.set_inheritable(args.fd, False)  # a reward function's child must not hold the channel open
    config = TypeAdapter(TrainerConfigUnion).validate_python(json.loads(args.config.read_text()))
    try:
        payload = read_payload(args.payload) if args.payload is not None else Payload()
    except Exception as error:
        asyncio.run(_refuse(args.fd, error))
        sys.exit(1)
    asyncio.run(_amain(args.fd, config, payload))
    sys.stdout.flush()
    sys.stderr.flush()
    # A reward function that still runs in a thread must not keep the process.
    os._exit(0)


async def _refuse(fd: int, error: Exception) -> None:
    channel = await AsyncChannel.open(socket.socket(fileno=fd))
    await Server(channel, SFTConfig.model_construct(), Payload())._report(error)
    channel.close()


if __name__ == "__main__":
    main()
