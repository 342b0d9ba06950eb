"""Watching over one run's trainer: start it, see it end, decide whether to go on.

    ┌─▶ servers up ─▶ trainer attempt n ─▶ finished ───────────────────────────────▶ result
    │                      │ trainer exit, signal, no server left, limit
    └── backoff ◀── policy ┴─▶ RunFailed(failure class, cause)

Invariants: an attempt is closed in the registry before the next one starts; of the flow and the trainer the one that knows
the cause first writes it; nothing that was started here is left running when `train_to_the_end` returns or raises.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flows import oom, provenance
from flows.config import RetryConfig, RunConfig
from flows.failures import Outcome, Policy, describe, failure_of, stopped_by
from flows.params import params_of
from infra.errors import InfraError
from infra.leases import LeaseManager
from infra.patience import plain
from infra.process import Supervised
from infra.registry import URL_VARIABLE, Registry, RunRow
from trainers.errors import LoopwrightError

logger = logging.getLogger(__name__)

POLL_S = 0.5
PROGRESS_S = 2.0
LAST_SHOW_S = 5.0
# The trainer may finish its step and write a checkpoint after SIGTERM; with its server gone it cannot. Less than the 30 s after
# which Prefect kills a flow run that it cancels: the flow still has to say how its run ended.
STOP_GRACE_S = 20.0
SERVER_GONE_GRACE_S = 5.0
# A server's death is known once everything it started is gone; its trainer may feel it sooner.
SERVER_DEATH_S = 3.0


class Servers(Protocol):
    """The servers a trainer needs."""

    def ensure(self) -> None:
        """Restart what is dead; raises if that fails."""
        ...

    def tend(self) -> str | None:
        """Replace what died while the trainer runs, without waiting; how the last server died, if the trainer waits in vain."""
        ...

    def death(self) -> str | None:
        """How a server died, with the end of its log; None: all live."""
        ...

    def serving(self, version: int) -> list[str]:
        """URLs of the servers that hold policy `version`."""
        ...

    def config_fields(self) -> dict[str, Any]:
        """What the trainer's config gets of them."""
        ...

    def environment(self) -> dict[str, str]:
        """Environment variables for the trainer: the servers' key."""
        ...

    def rows(self) -> list[dict[str, Any]]:
        """What to show of each server."""
        ...

    def busy_gpu_s(self) -> dict[str, float]:
        """By role, GPU seconds so far in which servers that the run started had requests."""
        ...

    def stop(self) -> None:
        """Stop what was started; harmless when there is nothing."""
        ...


class NoServers:
    """For algorithms that generate nothing."""

    def ensure(self) -> None:
        return

    def tend(self) -> str | None:
        return None

    def death(self) -> str | None:
        return None

    def serving(self, version: int) -> list[str]:
        return []

    def config_fields(self) -> dict[str, Any]:
        return {}

    def environment(self) -> dict[str, str]:
        return {}

    def rows(self) -> list[dict[str, Any]]:
        return []

    def busy_gpu_s(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        return


@dataclass
class TrainerJob:
    """One run's trainer: everything an attempt is started from."""

    registry: Registry
    run: RunRow
    config: RunConfig
    servers: Servers
    leases: LeaseManager
    fields: dict[str, Any]  # `flows.config.trainer_fields`
    tracking_uri: str
    environment: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = (sys.executable, "-m", "trainers.main")
    deadline: float | None = None  # time.monotonic() at which limits.wall_clock_s is used up
    on_progress: Callable[[dict[str, Any]], None] = lambda progress: None
    on_attempt: Callable[[int], None] = lambda number: None
    over_limit: Callable[[], str | None] = lambda: None  # which of the run's limits is used up

    @property
    def folder(self) -> Path:
        assert self.run.output_dir is not None, self.run.id
        return Path(self.run.output_dir)


def train_to_the_end(job: TrainerJob) -> None:
    """Run attempts until one finishes.

    Raises:
        RunFailed: the retry policy is used up, or the wall clock.
    """
    policy = Policy(job.config.retry)
    job.fields |= _oom_change(job) or {}
    while True:
        attempt = job.registry.start_attempt(job.run.id).number
        job.on_attempt(attempt)
        outcome = _attempt(job, attempt)
        if outcome.failure is None:
            job.registry.end_attempt(job.run.id, attempt, "FINISHED")
            return
        job.registry.end_attempt(job.run.id, attempt, "FAILED", outcome.failure, outcome.cause, outcome.traceback)
        if (change := _try_smaller(job, attempt, outcome)) is not None:
            job.registry.set_stage(job.run.id, oom.STAGE, change)
            job.fields |= change
            print(f"attempt {attempt} failed (memory): {outcome.cause}", flush=True)
            continue
        policy.wait(outcome, f"attempt {attempt}", _time_left(job))


def _oom_change(job: TrainerJob) -> dict[str, int] | None:
    """What an earlier attempt made smaller because it ran out of memory."""
    return job.registry.get_run(job.run.id).stages.get(oom.STAGE)


def _try_smaller(job: TrainerJob, attempt: int, outcome: Outcome) -> dict[str, int] | None:
    """What the next attempt is to make smaller, which the cause of this one then says too; None: nothing."""
    if outcome.failure != "memory" or outcome.of_servers or not job.config.oom_retry:
        return None
    change = None
    if (done := _oom_change(job)) is not None:
        told = f"oom_retry has been used: the attempt had {oom.describe(done)}"
    else:
        change = oom.smaller(job.fields, oom.longest_sequence(job.fields, job.servers.rows()))
        told = "oom_retry cannot halve the rows: set token_budget"
        if change is not None:
            told = f"oom_retry goes on once with {oom.describe(change)}"
    outcome.cause += f"\n{told}"
    job.registry.add_to_cause(job.run.id, attempt, told)
    return change


def serve(servers: Servers, retry: RetryConfig) -> None:
    """Servers up and able, tried again by policy.

    Raises:
        RunFailed: the retry policy is used up.
    """
    policy = Policy(retry)
    while True:
        try:
            servers.ensure()
            return
        except (InfraError, LoopwrightError) as error:
            policy.wait(Outcome(failure_of(error), str(error)), "start of the servers")


def _attempt(job: TrainerJob, attempt: int) -> Outcome:
    try:
        return _started(job, attempt)
    except BaseException as error:
        _note_end(job, attempt, error)
        raise


def _note_end(job: TrainerJob, attempt: int, error: BaseException) -> None:
    """The first to close an attempt wins, so this is said before anything is waited for: a flow that does not live to see its
    trainer end was stopped all the same, and the reaper reads it here."""
    try:
        if isinstance(error, Exception):
            job.registry.end_attempt(job.run.id, attempt, "FAILED", failure_of(error), describe(error))
        else:
            plain(job.registry).end_attempt(job.run.id, attempt, "KILLED", cause=stopped_by(error))  # no time to wait
    except Exception as trouble:  # whatever a database's driver raises; what ended the flow must not be lost over it
        logger.warning("the registry could not be told how attempt %d ended: %s", attempt, trouble)


def _started(job: TrainerJob, attempt: int) -> Outcome:
    if over := job.over_limit():
        return Outcome("user", over)
    try:
        job.servers.ensure()
    except (InfraError, LoopwrightError) as error:
        return Outcome(failure_of(error), str(error), of_servers=True)
    provenance.record(job.registry, job.run.id, job.config, job.folder, attempt)
    log = job.folder / "logs" / f"trainer-{attempt}.log"
    lease = job.leases.lease_process(f"trainer of {job.run.name}", job.run.id)
    try:
        trainer = Supervised.start(command(job, attempt), env=environment(job), log=log, lease=lease.id, grace_s=STOP_GRACE_S)
        try:
            return _watch(job, attempt, trainer)
        except BaseException as error:
            _note_end(job, attempt, error)
            raise
        finally:
            trainer.stop()
    finally:
        job.leases.release(lease)


def _watch(job: TrainerJob, attempt: int, trainer: Supervised) -> Outcome:
    with _showing(job):
        while trainer.poll() is None:
            time.sleep(POLL_S)
            if gone := job.servers.tend():
                trainer.stop(SERVER_GONE_GRACE_S)
                return Outcome("infrastructure", gone)
            if over := job.over_limit():
                trainer.stop()
                return Outcome("user", over)
            if _time_left(job) <= 0:
                trainer.stop()
                return Outcome("user", f"limits.wall_clock_s={job.config.limits.wall_clock_s:g} is used up; resume to go on")
    return _exit_outcome(job, attempt, trainer)


@contextmanager
def _showing(job: TrainerJob) -> Iterator[None]:
    """Progress is shown meanwhile, from a thread: a registry or Prefect that hangs must not keep the flow from its watch."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(PROGRESS_S):
            _show(job)
        _show(job)

    thread = threading.Thread(target=copy_context().run, args=(show,), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LAST_SHOW_S)


def _show(job: TrainerJob) -> None:
    """A registry that is out of reach costs a look at the progress, not the training."""
    try:
        job.on_progress(plain(job.registry).get_run(job.run.id).progress)
    except Exception as error:  # whatever a database's driver raises
        logger.warning("progress of %s is not shown: %s: %s", job.run.name, type(error).__name__, error)


def _exit_outcome(job: TrainerJob, attempt: int, trainer: Supervised) -> Outcome:
    """What the trainer's end means: its own account if it left one, else what the exit and the log tell."""
    if trainer.returncode == 0:
        return Outcome()
    row = next(row for row in job.registry.list_attempts(job.run.id) if row.number == attempt)
    told = row.status == "FAILED"
    if (not told or row.failure_class == "infrastructure") and (death := _server_death(job.servers)):
        return Outcome("infrastructure", death)
    if told:
        return Outcome(row.failure_class or "user", row.cause or "the trainer gave no cause", row.traceback)  # type: ignore[arg-type]
    tail = trainer.log_tail()
    # 143: it was asked to stop, and not by this flow. torchrun's own exit code is 1 whatever a rank died of.
    killed = (trainer.returncode or 0) < 0 or trainer.returncode == 143 or re.search(r"exitcode\s*:\s*-\d+", tail)
    how = f"the trainer ended: {trainer.describe_exit()}"
    return Outcome("infrastructure" if killed else "user", f"{how}\nend of {trainer.log_path}:\n{tail}", tail)


def _server_death(servers: Servers) -> str | None:
    deadline = time.monotonic() + SERVER_DEATH_S
    while (death := servers.death()) is None and servers.rows() and time.monotonic() < deadline:
        time.sleep(0.1)
    return death


def command(job: TrainerJob, attempt: int) -> list[str]:
    """The trainer's command line; its config is written to the run's folder, with references as written."""
    path = job.folder / "logs" / f"trainer-{attempt}.json"
    run = job.registry.get_run(job.run.id)
    payload = {
        "config": {**job.fields, **job.servers.config_fields()},
        "run": {
            "id": run.id,
            "name": run.name,
            "flow": run.flow,
            "attempt": attempt,
            "params": params_of(job.config),
            "tracking_uri": job.tracking_uri,
            "experiment": job.config.tracking.experiment,
            "mlflow_run_id": run.mlflow_run_id,
            "tags": {
                **job.config.tags,
                **{f"loopwright.{name}": str(value) for name, value in run.stages.get(oom.STAGE, {}).items()},
            },
            "sweep": job.config.sweep and job.config.sweep.model_dump(),
            "storage": job.config.storage.of_run(run.name).as_json(),
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=2, ensure_ascii=False), encoding="utf-8")
    if job.config.trainer.ranks == 1:
        return [*job.program, str(path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    return [*torchrun, f"--nproc-per-node={job.config.trainer.ranks}", *job.program, str(path)]


def environment(job: TrainerJob) -> dict[str, str]:
    """The registry's address, which may hold a password, is here and in no file."""
    # Tensors of long sequences are large and of ever other sizes: blocks that cannot grow leave gaps between them. Not where
    # servers are given the trainer's memory by handle (weight_sync `ipc`).
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if job.config.type == "sft" else {}
    return {**memory, **os.environ, **job.environment, **job.servers.environment(), URL_VARIABLE: job.registry.url}


def _time_left(job: TrainerJob) -> float:
    return float("inf") if job.deadline is None else job.deadline - time.monotonic()
