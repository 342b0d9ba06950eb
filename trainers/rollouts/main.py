"""The rollout process: `python -m trainers.rollouts.main --fd N CONFIG.json [PAYLOAD]`.

    trainer ══ socket pair ══▶ start, request, waiting, committed, synced, snapshot, close
            ◀═════════════════ info, step, snapshot, error, alive (every 2 s)

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
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from trainers.algorithms import build_algorithm
from trainers.config import AsyncTrainerConfig, GRPOConfig, SFTConfig, TrainerConfig, TrainerConfigUnion
from trainers.data import PromptBuilder, Rows, check_columns, load_rows, load_tokenizer
from trainers.errors import ConfigError
from trainers.metrics import MetricBag
from trainers.packing import step_to_wire
from trainers.rewards import load_callable
from trainers.rollouts.channel import AsyncChannel, Message
from trainers.rollouts.client import GenerateClient
from trainers.rollouts.engine import StepEngine, write_snapshot
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.rollouts.payload import Payload, read_payload
from trainers.rollouts.scoring import Scorer
from trainers.rollouts.source import RecordedSource, RolloutSource

ALIVE_EVERY_S = 2.0


def concurrency_cap(config: AsyncTrainerConfig, world_size: int) -> int:
    """Most rollouts in flight."""
    if config.max_concurrent_rollouts is not None:
        return config.max_concurrent_rollouts
    per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * world_size
    return max(config.max_staleness, 1) * per_step


def tokenizer_without_torch(config: TrainerConfig) -> Any:
    """The tokenizer, loaded without torch if nothing here has imported it yet: that saves 5 s of CPU and 300 MB.

    transformers looks for torch once, when it is imported. It is forgotten afterwards, so that a reward function that wants a
    model finds one that knows of torch.
    """
    if "torch" in sys.modules or "transformers" in sys.modules or config.trust_remote_code:
        return load_tokenizer(config)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python marks a module as not to be found
    try:
        return load_tokenizer(config)
    finally:
        del sys.modules["torch"]
        if isinstance(config, GRPOConfig) and not all(
            spec.path.startswith("trainers.rewards:") for spec in config.reward_funcs
        ):
            for name in [name for name in sys.modules if name == "transformers" or name.startswith("transformers.")]:
                del sys.modules[name]


async def build_engine(
    config: TrainerConfig, payload: Payload, *, version: int, resume_step: int, world_size: int
) -> tuple[StepEngine, dict[str, Any]]:
    """An engine with its source opened, not yet started, and the `SourceInfo` fields.

    Raises:
        DatasetError, ConfigError, ServerError: the data, the model or the server cannot be used.
    """
    rows = Rows(payload.dataset, "train_dataset") if payload.dataset is not None else load_rows(config.dataset)
    check_columns(rows, config)
    tokenizer = payload.tokenizer or tokenizer_without_torch(config)
    builder = PromptBuilder(tokenizer, config)
    algorithm = build_algorithm(config)
    metrics = MetricBag()
    rng = np.random.default_rng([config.seed, resume_step])
    holder: list[StepEngine] = []  # the loop reports progress to the engine, which is built after it

    source: RolloutSource
    if isinstance(config, SFTConfig):
        source = RecordedSource(rows, builder, algorithm, config.max_length)
    else:
        assert isinstance(config, GRPOConfig), config
        functions = payload.reward_funcs or [load_callable(spec) for spec in config.reward_funcs]
        if not functions and payload.loop_class is None:
            raise ConfigError("no reward function is given: name at least one in `reward_funcs`")
        if config.reward_weights is not None and len(config.reward_weights) != len(functions):
            raise ConfigError(f"reward_weights has {len(config.reward_weights)} values for {len(functions)} reward functions")
        loop_class: type[AsyncRolloutLoop] = payload.loop_class or AsyncRolloutLoop
        source = loop_class(
            payload.args if payload.args is not None else config,
            settings=config,
            algorithm=algorithm,
            rows=rows,
            tokenizer=tokenizer,
            client=GenerateClient(
                config.vllm_server_base_url,
                config.vllm_server_timeout,
                on_retry=lambda cause: metrics.add("rollout/vllm_retry_total", 1),
            ),
            scorer=Scorer(functions, config.reward_weights, metrics),
            metrics=metrics,
            cap=concurrency_cap(config, world_size),
            next_seed=lambda: int(rng.integers(0, 2**63 - 1)),
            progress=lambda: holder[0].progress(),
        )
    await source.open()
    budget = config.token_budget
    token_budget = source.max_sequence_tokens if budget is None else budget if budget > 0 else None
    engine = StepEngine(
        config,
        algorithm,
        source,
        rows,
        builder,
        token_budget=token_budget,
        max_sequence_tokens=source.max_sequence_tokens,
        version=version,
        resume_step=resume_step,
        world_size=world_size,
        metrics=metrics,
        rng=rng,
    )
    holder.append(engine)
    info = {
        "prompts": len(rows),
        "fingerprint": engine.fingerprint,
        "token_budget": token_budget,
        "max_sequence_tokens": source.max_sequence_tokens,
        "vocab_size": len(tokenizer),
    }
    return engine, info


class Server:
    """Answers the trainer's messages."""

    def __init__(self, channel: AsyncChannel, config: TrainerConfig, payload: Payload) -> None:
        self._channel, self._config, self._payload = channel, config, payload
        self._engine: StepEngine | None = None
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
            if self._engine is not None:
                await self._engine.close()

    async def _handle(self, message: Message) -> None:
        fields = message.fields
        if message.type == "start":
            self._engine, info = await build_engine(
                self._config,
                self._payload,
                version=fields["version"],
                resume_step=fields["resume_step"],
                world_size=fields["world_size"],
            )
            if fields["resume_dir"] is not None:
                self._engine.restore(Path(fields["resume_dir"]))
            self._engine.start()
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
            engine.committed(fields["index"])
        elif message.type == "synced":
            engine.synced(fields["version"])
        elif message.type == "snapshot":
            state, arrays = engine.snapshot()
            await asyncio.to_thread(write_snapshot, Path(fields["directory"]), state, arrays)
            await self._channel.send(Message("snapshot", {"state": state}))
        else:
            raise AssertionError(f"unknown message {message.type!r}")

    async def _step(self, engine: StepEngine, index: int, train_version: int) -> None:
        try:
            step = await engine.step(index, train_version)
            rows = engine.drain_rows()
            if step is None:
                await self._channel.send(Message("step", {"step": None, "rows": rows}))
            else:
                fields, arrays = step_to_wire(step)
                await self._channel.send(Message("step", {"step": fields, "rows": rows}, arrays))
        except Exception as error:
            await self._report(error)

    async def _report(self, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        await self._channel.send(Message("error", {"class": type(error).__name__, "message": str(error), "traceback": trace}))

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            await self._channel.send(Message("alive", {"doing": self._engine.describe() if self._engine else "starting"}))


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
