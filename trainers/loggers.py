"""TensorBoard, Weights & Biases and transformers' other loggers beside a run's own metrics (`report_to`).

    CallbackHandler ──event, copies of state and control──▶ queue ──▶ a thread per logger ──▶ transformers' callback ──▶ logger
    (training thread)

Invariants:
- training waits for no logger but at its end, and there at most `DRAIN_S`; one that raises is warned of, and after `FAILURES`
  errors in a row it is left alone until the run is resumed;
- one value per step after a resume. TensorBoard is told which steps count no more. W&B can take nothing back, so it gets the
  values of a step when the step's checkpoint is whole; what a kill kept from it is sent from the log history that the resume
  restores. A logger that is neither of the two begins a run of its own with each attempt, as it does with `Trainer`.
"""

from __future__ import annotations

import atexit
import copy
import json
import logging
import netrc
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)

from trainers.errors import ConfigError
from trainers.training_arguments import missing_logger

logger = logging.getLogger(__name__)

DRAIN_S = 30.0  # for everything to reach the loggers when training ends
FAILURES = 3
WAITING = 10_000  # events; more than this a logger that hangs may not hold in memory
REACH_S = 3.0


class Event(NamedTuple):
    name: str
    args: Any
    state: Any
    control: Any
    kwargs: dict[str, Any]


class Reporter(TrainerCallback):
    """Passes a run's events on to one logger, in a thread that rank 0 starts when training begins.

    Args:
        name: the logger's, for messages.
        make: makes transformers' callback, in the thread: importing a logger may take seconds.
    """

    def __init__(self, name: str, make: Callable[[], TrainerCallback]) -> None:
        self.name, self._make = name, make
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._full = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"report-to-{self.name}", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a run that fails has no `on_train_end`
        self._pass_on("on_train_begin", args, state, control, kwargs)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass_on("on_log", args, state, control, kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `Trainer` logs the metrics of an evaluation under these names before it fires the event.
        logs = {name.replace("eval/", "eval_", 1): value for name, value in (kwargs.get("metrics") or {}).items()}
        if logs:
            self._pass_on("on_log", args, state, control, {**kwargs, "logs": logs})
        self._pass_on("on_evaluate", args, state, control, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass_on("on_save", args, state, control, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass_on("on_train_end", args, state, control, kwargs)
        self.close()

    def close(self) -> None:
        """Wait, for a while, until the logger has taken everything."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        self._events.put(None)
        thread.join(DRAIN_S)
        if thread.is_alive():
            logger.warning("report_to %s: it did not take everything within %.0f s", self.name, DRAIN_S)

    def _pass_on(self, name: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        if self._thread is None:
            return
        if self._events.qsize() >= WAITING:
            if not self._full:
                logger.warning("report_to %s: it does not keep up, or hangs; further values are left out", self.name)
            self._full = True
            return
        shown = copy.copy(state)
        # Only the first event's reader looks at it, and the loop goes on appending.
        shown.log_history = list(state.log_history) if name == "on_train_begin" else []
        self._events.put(Event(name, args, shown, copy.copy(control), kwargs))

    def _serve(self) -> None:
        callback: TrainerCallback | None = None
        failures = 0
        while (event := self._events.get()) is not None:
            if failures == FAILURES:
                continue
            try:
                callback = callback or self._make()
                getattr(callback, event.name)(event.args, event.state, event.control, **event.kwargs)
                failures = 0
            except BaseException as error:  # wandb ends some failures by SystemExit
                failures += 1
                rest = "; it gets no more of this attempt" if failures == FAILURES else ""
                logger.warning("report_to %s: %s: %s; training goes on%s", self.name, type(error).__name__, error, rest)


class TensorBoard(TensorBoardCallback):
    """One folder of event files per run, `<output_dir>/tensorboard` unless TENSORBOARD_LOGGING_DIR says otherwise."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logging_dir = self.logging_dir or os.path.join(args.output_dir, "tensorboard")
        resumed = state.global_step
        if resumed == 0:
            self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=0)
            super().on_train_begin(args, state, control, **kwargs)  # writes what does not change with an attempt
        else:
            self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=resumed + 1)


class Wandb(WandbCallback):
    """One W&B run for a run's whole life.

    Args:
        project, run_name, config: of the W&B run, where the environment (WANDB_PROJECT, WANDB_NAME) does not say them.
        run_id: unique to the run; None: one is made, and kept in `<output_dir>/wandb/loopwright.json`.
    """

    def __init__(self, project: str, run_name: str | None, config: dict[str, Any] | None, run_id: str | None) -> None:
        super().__init__()
        self._project, self._run_name, self._config, self._run_id = project, run_name, config, run_id
        self._sent = 0
        self._held: list[tuple[Any, Any, Any, dict[str, Any]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._state_file = Path(args.output_dir) / "wandb" / "loopwright.json"
        resumed = state.global_step
        known, given = self._read(), os.environ.get("WANDB_RUN_ID") or self._run_id
        if resumed == 0 and known.get("sent"):
            self._run_id, self._sent = secrets.token_hex(8), 0  # anew: what was sent stays in the earlier W&B run
        else:
            self._run_id = known.get("id") or given or secrets.token_hex(8)
            # The run's folder may be lost while W&B knows the run by its id: what was committed has been sent then.
            self._sent = known.get("sent", resumed if given else 0)
        self._write()
        self.setup(args, state, model, **kwargs)
        for entry in state.log_history:
            if self._sent < (step := entry.get("step", 0)) <= resumed:
                logs = {name: value for name, value in entry.items() if name not in ("step", "epoch")}
                self._hold(args, state, control, logs, step)
        self._release(resumed)

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if self._wandb.run is None and state.is_world_process_zero:
            mode: Any = os.environ.get("WANDB_MODE") or _wandb_mode(self._wandb.Settings().base_url)
            options: dict[str, Any] = {
                "project": os.environ.get("WANDB_PROJECT") or self._project,
                "name": os.environ.get("WANDB_NAME") or self._run_name,
                "config": self._config,
                "dir": os.environ.get("WANDB_DIR") or args.output_dir,
                "id": self._run_id,
            }
            try:
                self._wandb.init(**options, mode=mode, resume="allow" if mode == "online" else None)
            except self._wandb.Error as error:
                if mode != "online":
                    raise
                logger.warning("report_to wandb: %s; W&B writes files only (`wandb sync` sends them)", error)
                self._wandb.init(**options, mode="offline")
        super().setup(args, state, model, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        self._hold(args, state, control, logs, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._release(state.global_step)
        super().on_save(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self._release(state.global_step)
        super().on_train_end(args, state, control, **kwargs)
        self._wandb.finish()

    def _hold(self, args: Any, state: Any, control: Any, logs: dict[str, Any], step: int) -> None:
        at = copy.copy(state)
        at.global_step = step
        self._held.append((args, at, control, logs))

    def _release(self, step: int) -> None:
        for args, state, control, logs in self._held:
            if self._sent < state.global_step <= step:
                super().on_log(args, state, control, logs=logs)
        self._held = [item for item in self._held if item[1].global_step > step]
        self._sent = max(self._sent, step)
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self._state_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _write(self) -> None:
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"id": self._run_id, "sent": self._sent}), encoding="utf-8")
        os.replace(temporary, self._state_file)


def reporting_callbacks(
    names: Iterable[str],
    *,
    project: str,
    run_name: str | None = None,
    run_id: str | None = None,
    config: dict[str, Any] | None = None,
) -> list[TrainerCallback | type[TrainerCallback]]:
    """One callback per logger of `report_to`. `config` is shown by W&B and must hold no secrets.

    Raises:
        ConfigError: there is no logger of this name, or its package is not installed.
    """
    made: list[TrainerCallback | type[TrainerCallback]] = []
    for name in names:
        if missing := missing_logger(name):
            raise ConfigError(missing)
        try:
            (theirs,) = get_reporting_integration_callbacks([name])
        except ValueError as error:
            raise ConfigError(f"report_to: {error}") from None
        make: Callable[[], TrainerCallback] = theirs
        if name == "tensorboard":
            make = TensorBoard
        elif name == "wandb":
            make = lambda: Wandb(project, run_name, config, run_id)  # noqa: E731
        made.append(Reporter(name, make))
    return made


def _wandb_mode(base_url: str) -> str:
    """`online` where there is a key for the server and the server can be reached; else W&B would ask, or make training wait."""
    parts = urlsplit(base_url)
    host = parts.hostname or "api.wandb.ai"
    try:
        has_key = bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        has_key = False
    if not has_key:
        logger.info("report_to wandb: no key for %s, so W&B writes files only (`wandb sync` sends them)", host)
        return "offline"
    try:
        socket.create_connection((host, parts.port or (80 if parts.scheme == "http" else 443)), REACH_S).close()
    except OSError as error:
        logger.warning(
            "report_to wandb: %s is out of reach (%s), so W&B writes files only (`wandb sync` sends them)", host, error
        )
        return "offline"
    return "online"
