"""The trainer's side of the rollout process: a `StepSource`.

    RolloutProcess ══ socket pair ══▶ trainers.rollouts.main      (one request open at most; answers come in order)
                   ══ Unix socket ══▶ rows of a step              (`RowClient`; the other ranks of this node have their own)

The child gets no GPU and no rank variables. Its death is seen as the end of the socket, or by looking at the process once a
second; either raises `RolloutProcessDied` with how it died. A child that says nothing for `rollout_worker_timeout` seconds
raises `NoProgress`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainers import errors
from trainers.config import TrainerConfig
from trainers.errors import NoProgress, RolloutCodeError, RolloutProcessDied, came_from
from trainers.packing import head_from_wire
from trainers.rollouts.channel import Channel, Message
from trainers.rollouts.payload import Payload, write_payload
from trainers.rollouts.rows import RowClient, socket_folder
from trainers.roster import Listed
from trainers.step_source import SourceInfo
from trainers.types import PackedRow, StepHead

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_CLOSE_S = 5.0
_START_S = 300.0  # imports and reading the data are silent
_DROPPED_ENV = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)
_DROPPED_ENV += ("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_DROPPED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "ACCELERATE_", "FSDP_")


def child_environment(environment: dict[str, str]) -> dict[str, str]:
    """The trainer's environment without devices, ranks and launcher variables."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _DROPPED_ENV and not name.startswith(_DROPPED_PREFIXES)
    }
    return kept | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def _die_with_parent() -> Callable[[], None] | None:
    """A hook for the forked child that asks Linux to kill it with its parent.

    The signal comes when the *thread* that forked ends, so only the main thread may ask for it.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    libc = ctypes.CDLL(None)  # looked up before the fork
    return lambda: libc.prctl(1, signal.SIGKILL) and None


class RolloutProcess:
    """Starts and talks to one rollout process. Used by one thread of trainer rank 0.

    Args:
        config: of the run; the server's key travels in the environment (`VLLM_API_KEY`), never in a file.
        payload: Python objects that a config cannot name.
    """

    def __init__(self, config: TrainerConfig, payload: Payload | None = None) -> None:
        self._config, self._payload = config, payload
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._directories: list[Path] = []
        self._row_client: RowClient | None = None
        self._rows_path: Path | None = None
        self._requested: tuple[int, int] | None = None
        self._rows: list[dict[str, Any]] = []
        self._doing = "starting"
        self._early: Message | None = None
        self._waiting = False
        self._silent_s = 0.0  # waited for it since its last message
        self.passes = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, *, resume_dir: Path | None, version: int, world_size: int, resume_step: int) -> SourceInfo:
        assert self._process is None, "started twice"
        directory = Path(tempfile.mkdtemp(prefix="loopwright-rollouts-"))  # mode 0700
        self._rows_path = socket_folder(directory) / "rows"
        self._directories = [directory, self._rows_path.parent]
        config_file = directory / "config.json"
        config_file.write_text(json.dumps(self._config.model_dump(mode="json")))
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "trainers.rollouts.main", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        command.append(str(config_file))
        if self._payload is not None:
            command.append(str(write_payload(self._payload, directory)))
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=child_environment(dict(os.environ)),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent(),
            )
        self._channel = Channel(ours, self._config.rollout_worker_timeout)
        self._send(
            "start",
            resume_dir=str(resume_dir.resolve()) if resume_dir is not None else None,
            version=version,
            world_size=world_size,
            resume_step=resume_step,
            rows=str(self._rows_path),
        )
        info = SourceInfo(**self._received("info").fields)
        self._row_client = RowClient(str(self._rows_path), self._config.rollout_worker_timeout)
        return info

    def request_step(self, index: int, train_version: int) -> None:
        assert self._requested is None, f"step {index} asked for while {self._requested} is open"
        self._requested = (index, train_version)
        self._send("request", index=index, train_version=train_version)

    def ready(self, index: int, train_version: int, timeout_s: float) -> bool:
        self._wait_for(index, train_version)
        self._early = self._early or self._receive("step", timeout_s)
        return self._early is not None

    def _wait_for(self, index: int, train_version: int) -> None:
        """From now on the process must make progress towards this step."""
        if self._requested is None:
            self.request_step(index, train_version)
        assert self._requested == (index, train_version), f"open request {self._requested}, asked for {(index, train_version)}"
        if not self._waiting:
            self._send("waiting")
            self._waiting = True

    def next_step(self, index: int, train_version: int) -> StepHead | None:
        self._wait_for(index, train_version)
        message = self._received("step")
        self._requested, self._waiting = None, False
        self._rows += [{"step": index, **row} for row in message.fields["rows"]]
        self.passes = message.fields["passes"]
        fields = message.fields["step"]
        return None if fields is None else head_from_wire(fields)

    def fetch(self, index: int, rank: int) -> list[PackedRow]:
        assert self._row_client is not None, "fetch before start() or after close()"
        try:
            return self._row_client.fetch(index, rank)
        except RolloutProcessDied:
            self._raise_last_words()

    @property
    def rows_address(self) -> str | None:
        return None if self._rows_path is None else str(self._rows_path)

    def check(self) -> None:
        assert self._process is not None, "check before start()"
        try:
            self._process.wait(_POLL_S)  # its sockets close a moment before it is gone
        except subprocess.TimeoutExpired:
            return
        self._raise_last_words()

    def committed(self, index: int) -> None:
        self._send("committed", index=index)

    def synced(self, version: int, served_as: str | None = None) -> None:
        self._send("synced", version=version, served_as=served_as)

    def servers(self, servers: Sequence[Listed]) -> None:
        self._send("servers", servers=[{"name": server.name, "url": server.url} for server in servers])

    def snapshot(self, directory: Path) -> dict[str, Any]:
        self._send("snapshot", directory=str(directory.resolve()))
        return self._received("snapshot").fields["state"]

    def drain_rollouts(self) -> list[dict[str, Any]]:
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it may be gone already
                self._channel.send(Message("close"))
            self._channel.close()
            self._channel = None
        if self._row_client is not None:
            self._row_client.close()
            self._row_client = None
        if self._process is not None and self._process.poll() is None:
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    # Transport

    def _send(self, kind: str, **fields: Any) -> None:
        assert self._channel is not None, f"{kind} before start() or after close()"
        try:
            self._channel.send(Message(kind, fields))
        except (BrokenPipeError, ConnectionResetError):
            self._raise_last_words()
        except TimeoutError:
            raise self._silent(self._config.rollout_worker_timeout) from None

    def _raise_last_words(self) -> NoReturn:
        """It is gone; if it said why before, raise that."""
        assert self._channel is not None
        try:
            while self._channel.wait(0):
                self._check(self._channel.recv())
        except EOFError:
            pass
        raise self._died()

    def _received(self, kind: str) -> Message:
        """The next message of this kind. A step that arrives while a snapshot is awaited is kept for `next_step`."""
        if kind == "step" and self._early is not None:
            message, self._early = self._early, None
            return message
        message = self._receive(kind)
        assert message is not None, "waited without end and got nothing"
        return message

    def _receive(self, kind: str, timeout_s: float = math.inf) -> Message | None:
        """The next message of this kind; None: none came within `timeout_s`."""
        assert self._channel is not None and self._process is not None
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(_POLL_S, left_s)
            if not self._channel.wait(wait_s):
                if self._process.poll() is not None and not self._channel.wait(0):
                    raise self._died()
                self._silent_s += wait_s
                limit_s = self._config.rollout_worker_timeout
                if self._silent_s > (max(limit_s, _START_S) if kind == "info" else limit_s):
                    raise self._silent(self._silent_s)
                continue
            try:
                message = self._channel.recv()
            except EOFError:
                raise self._died() from None
            except TimeoutError:
                raise self._silent(self._config.rollout_worker_timeout) from None
            self._silent_s = 0.0
            self._check(message)
            if message.type == kind:
                return message
            if message.type == "step":
                self._early = message
            elif message.type == "alive":
                if kind == "info" and message.fields["doing"] != self._doing:
                    logger.info("the rollout process starts: %s", message.fields["doing"])
                self._doing = message.fields["doing"]
        return None

    def _check(self, message: Message) -> None:
        if message.type != "error":
            return
        fields = message.fields
        known = getattr(errors, fields["class"], None) or {"TypeError": TypeError}.get(fields["class"])
        if isinstance(known, type) and issubclass(known, Exception):
            raise came_from(known(fields["message"]), fields["traceback"])
        error = RolloutCodeError(f"{fields['class']} in the rollout process: {fields['message']}")
        raise came_from(error, fields["traceback"])

    def _silent(self, seconds: float) -> NoProgress:
        return NoProgress(f"the rollout process has said nothing for {seconds:.0f} s; it was: {self._doing}")

    def _died(self) -> RolloutProcessDied:
        assert self._process is not None
        try:
            code = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            return RolloutProcessDied(f"the rollout process (pid {self._process.pid}) closed its channel and hangs")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RolloutProcessDied(f"the rollout process (pid {self._process.pid}) {how}; it was: {self._doing}")
