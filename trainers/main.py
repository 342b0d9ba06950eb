"""The trainer's entry for flows: `python -m trainers.main CONFIG.json`, alone or under torchrun.

    CONFIG.json {"config": …, "run": id, name, attempt, tracking_uri, experiment, mlflow_run_id, tags, sweep, storage}
    LOOPWRIGHT_REGISTRY_URL in the environment
        ─▶ TrainLoop ─▶ rank 0: RunSink ─▶ Tracker (MLflow, own thread)
                        │                 └─▶ Registry (progress and checkpoints, own thread)
                        └─ saved ─▶ Uploads ─▶ `python -m trainers.main --mirror`: shared storage, own process

The only module of `trainers` that imports `infra`. Exit codes: 0 done; 1 failed, the attempt is closed in the registry with
failure class, cause and traceback; 143 stopped by SIGTERM after saving, the attempt is left for its flow to judge. Registry,
MLflow and shared storage out of reach never stop training; what is not stored at its end is left to the flow too.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from infra.patience import open_patiently, out_of_reach, patient, patiently
from trainers.config import TrainerConfig, TrainerConfigUnion
from trainers.errors import CheckpointError, ConfigError, LoopwrightError, full_traceback
from trainers.metrics import spec_of
from trainers.references import resolve
from trainers.retention import Retention
from trainers.step_source import SourceInfo
from trainers.watched import Watched

if TYPE_CHECKING:
    from infra.storage.run_storage import RunStorage
    from infra.storage.uploads import Uploads

logger = logging.getLogger(__name__)
STOPPED = 143
COSTS_S = 30.0
CLOSE_S = 600.0  # for what the registry is still to be told when training has ended, if its database is away


def read_config(fields: dict[str, Any]) -> TrainerConfig:
    """The validated config with its references to the environment resolved.

    Raises:
        ConfigError: one line per wrong value.
    """
    try:
        return TypeAdapter(TrainerConfigUnion).validate_python(resolve(fields))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'][1:])) or 'config'}: {item['msg']}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def describe(error: BaseException) -> tuple[str, str]:
    """(failure class, cause) of what ended a run; the cause's first line says it."""
    if isinstance(error, LoopwrightError):
        return error.failure_class, str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "memory",
            f"out of memory: {error}; lower token_budget, or raise gradient_accumulation_steps or the number of ranks",
        )
    return "user", f"{type(error).__name__}: {error}"


class RegistryWriter:
    """Writes to the registry from a thread of its own, in order; while the database is out of reach, all of it waits."""

    def __init__(self, registry: Any, run_id: str) -> None:
        self.registry, self.run_id = registry, run_id
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._progress: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._gave_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="registry", daemon=True)
        self._thread.start()

    def progress(self, values: dict[str, Any]) -> None:
        """Merged with what is not yet written: a slow database sees fewer rows, not older ones."""
        with self._lock:
            idle = not self._progress
            self._progress.update(values)
        if idle:
            self._work.put(self._write_progress)

    def submit(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all is written. What is not by then the flow finds out for itself: checkpoints from the run's folder."""
        self._work.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("registry: out of reach for %.0f s; the run's last progress is not in it", timeout_s)
            self._gave_up.set()

    def _write_progress(self) -> None:
        with self._lock:
            values, self._progress = self._progress, {}
        try:
            self.registry.progress(self.run_id, values)
        except Exception as error:
            if out_of_reach(error):  # written again, with what has come since
                with self._lock:
                    self._progress = {**values, **self._progress}
            raise

    def _serve(self) -> None:
        while (work := self._work.get()) is not None and not self._gave_up.is_set():
            try:
                patiently(work, what="registry", wait=self._gave_up.wait)
            except Exception as error:
                logger.warning("registry: %s: %s", type(error).__name__, str(error).splitlines()[0])


class CostLog:
    """Tokens to the registry; what the flow wrote there (GPU seconds, money) back, to be logged. Once in `COSTS_S`."""

    def __init__(self, writer: RegistryWriter) -> None:
        self._writer = writer
        self._known: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._exchanged = float("-inf")

    def known(self, metrics: dict[str, float]) -> dict[str, float]:
        """By catalog name, as of the last look; `metrics`: those of the step, which carry the tokens."""
        for name, value in metrics.items():
            if name.startswith("cost/tokens/"):
                self._tokens[name.removeprefix("cost/")] = value
        if time.monotonic() - self._exchanged >= COSTS_S:
            self.exchange()
        return self._known

    def exchange(self) -> None:
        """In the registry's thread. Tokens are the run's, over all attempts, so they stand under attempt 0."""
        self._exchanged = time.monotonic()
        tokens, registry, run_id = dict(self._tokens), self._writer.registry, self._writer.run_id

        def exchange() -> None:
            registry.add_costs(run_id, 0, tokens)
            used = registry.costs(run_id).items()
            self._known = {f"cost/{kind}": value for kind, value in used if kind == "usd" or kind.startswith("gpu_s/")}

        self._writer.submit(exchange)


class RunSink:
    """`MetricSink` of a run with a registry row: metrics to MLflow, progress and checkpoints to the registry."""

    def __init__(
        self, config: TrainerConfig, tracker: Any, writer: RegistryWriter, fields: dict[str, Any], run: dict[str, Any]
    ) -> None:
        self.config, self.tracker, self.writer, self.fields, self.attempt = config, tracker, writer, fields, run["attempt"]
        self.params: dict[str, Any] = run.get("params") or fields
        self.is_started = False
        self._first: tuple[int, float] | None = None
        self._limit = ""
        self.costs = CostLog(writer)
        self.watched: Watched | None = None  # set for a trial of a sweep
        self._stored: dict[int, str] = {}  # where in shared storage a step's checkpoint lies

    def started(self, info: SourceInfo, resume_step: int) -> None:
        dataset = self.config.dataset
        entry: dict[str, Any] = {
            "source": dataset.path,
            "digest": info.fingerprint,
            "name": Path(dataset.path).name,
            "split": dataset.split,
            "context": "training",
        }
        if info.prompts is not None:
            entry["rows"] = info.prompts
        self.tracker.start(self.params, entry, resume_step, self.fields)
        self._note_provenance(info)
        self.is_started = True
        self._first = (resume_step, time.monotonic())
        self.writer.submit(lambda: self.writer.registry.set_resume_step(self.writer.run_id, self.attempt, resume_step))
        self.writer.progress({"step": resume_step, "max_steps": self.config.max_steps})

    def _note_provenance(self, info: SourceInfo) -> None:
        """The dataset's fingerprint, which the flow could not know; whole now, it goes to MLflow and into checkpoints."""
        from infra import provenance

        folder = Path(self.config.output_dir)
        try:
            provenance.note(folder, self.attempt, fingerprint=info.fingerprint, rows=info.prompts)
        except OSError as error:
            logger.warning("the dataset's fingerprint is not noted in %s: %s", folder / provenance.FILE, error)
        if (file := provenance.attempt_file(folder, self.attempt)).is_file():
            self.tracker.log_artifact_dir(file, "provenance")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log(step, {**metrics, **self.costs.known(metrics)})
        shown = ("loss", "reward", "token_accuracy", "grad_norm", "num_tokens", "perf/step_s", "eval/accuracy")
        values = {name: metrics[name] for name in shown if name in metrics}
        logger.info("step %d  %s  %s", step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()), self._limit)
        progress: dict[str, Any] = {"step": step, "max_steps": self.config.max_steps, "bottleneck": self._limit}
        progress |= {name: metrics[name] for name in ("num_tokens", "reward", "loss", "eval/accuracy") if name in metrics}
        if self.watched is not None:
            progress |= self.watched.progress(step, metrics)
        if self._first is not None and self.config.max_steps > 0 and step > self._first[0]:
            pace = (time.monotonic() - self._first[1]) / (step - self._first[0])
            progress["eta_s"] = pace * (self.config.max_steps - step)
        self.writer.progress(progress)

    def commit(self, step: int) -> None:
        """Told with the checkpoint's folder, in `checkpoint`."""

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.tracker.log_rollouts(step, rows)

    def bottleneck(self, step: int, text: str) -> None:
        self._limit = text
        self.tracker.set_tags({"bottleneck": text.split(":")[0]})

    def checkpoint(self, step: int, path: str) -> None:
        self.tracker.commit(step, path)
        self.writer.submit(lambda: self._note_checkpoint(step, Path(path).absolute()))

    def resumed(self, step: int, path: Path) -> None:
        """The run goes on from here; on another machine it is another folder than the registry knows. A trainer that was killed
        between a checkpoint and its row left none."""
        self.writer.submit(lambda: self._note_resumed(step, path.absolute()))

    def _note_resumed(self, step: int, path: Path) -> None:
        if any(row.step == step for row in self.writer.registry.list_checkpoints(self.writer.run_id)):
            self.writer.registry.update_checkpoint(self.writer.run_id, step, path=str(path))
        else:
            self._note_checkpoint(step, path)

    def storage_event(self, event: dict[str, Any]) -> None:
        """What the mirror says: see `infra.storage.mirror`."""
        step = event.get("step")
        if event["event"] == "stored":
            self._stored[step] = event["uri"]  # type: ignore[index]
            self.writer.submit(lambda: self.writer.registry.update_checkpoint(self.writer.run_id, step, uri=event["uri"]))
        elif event["event"] == "removed":
            self._stored.pop(step, None)  # type: ignore[arg-type]
            self.writer.submit(lambda: self.writer.registry.update_checkpoint(self.writer.run_id, step, uri=None))
            self.writer.submit(self._forget_deleted)

    def _note_checkpoint(self, step: int, path: Path) -> None:
        """The new one; and those that retention has deleted are forgotten."""
        from trainers.checkpoint import Found

        metrics = Found.read(path).metrics
        self.writer.registry.record_checkpoint(self.writer.run_id, step, str(path), uri=self._stored.get(step), metrics=metrics)
        self._forget_deleted()

    def _forget_deleted(self) -> None:
        registry, run_id = self.writer.registry, self.writer.run_id
        for row in registry.list_checkpoints(run_id):
            if row.uri is None and not Path(row.path).exists():
                registry.forget_checkpoint(run_id, row.step)


class Reporting:
    """Rank 0's registry and tracker, and how they are told the end. Other ranks only report their own failure."""

    def __init__(self, fields: dict[str, Any], run: dict[str, Any], is_main: bool) -> None:
        self.run, self.fields, self.is_main = run, fields, is_main
        self.sink: RunSink | None = None

    def open(self, config: TrainerConfig) -> RunSink:
        from infra.tracking import Tracker
        from infra.tracking_tags import attempt_tags

        run = self.run
        self.writer = RegistryWriter(open_patiently(CLOSE_S), run["id"])
        self.tracker = Tracker(
            config.output_dir,
            run.get("tracking_uri"),
            run.get("experiment"),
            run["name"],
            run.get("mlflow_run_id"),
            attempt_tags(run, config.output_dir, getattr(config, "vllm_server_base_url", None)),
            check=spec_of,
            on_run_id=lambda mlflow_id: self.writer.submit(
                lambda: self.writer.registry.update_run(run["id"], mlflow_run_id=mlflow_id)
            ),
        )
        self.sink = RunSink(config, self.tracker, self.writer, self.fields, run)
        if sweep := run.get("sweep"):
            self.sink.watched = Watched(sweep["watch"], sweep["average_steps"], sweep["every_steps"])
        return self.sink

    def failed(self, error: BaseException) -> None:
        """Close the attempt; the first rank to do so wins, and what rank 0 told the others is left to rank 0."""
        from infra.redaction import redact

        failure, cause = describe(error)
        if not self.is_main and cause.startswith("rank 0: "):
            return
        cause, text = redact(cause), redact(full_traceback(error))
        try:
            run = self.run
            patient(open_patiently(CLOSE_S), CLOSE_S).end_attempt(run["id"], run["attempt"], "FAILED", failure, cause, text)
        except Exception as trouble:
            logger.warning("the registry could not be told how the run ended: %s", trouble)
        self.close("FAILED", cause, failure)

    def close(self, status: Any, cause: str | None = None, failure: str | None = None) -> None:
        if self.sink is None:
            return
        if not self.sink.is_started:
            self.tracker.start(self.sink.params, config=self.fields)
        self.tracker.close(status, cause, failure)
        self.sink.costs.exchange()
        self.writer.close()


def loggers_of(config: TrainerConfig, fields: dict[str, Any], run: dict[str, Any]) -> Sequence[Any]:
    """Callbacks of `report_to`: one TensorBoard folder and one W&B run for the run's whole life."""
    from infra.tracking_params import without_secrets
    from trainers.loggers import reporting_callbacks

    shown = without_secrets(fields)
    project = run.get("experiment") or "loopwright"
    return reporting_callbacks(config.report_to, project=project, run_name=run["name"], run_id=run["id"], config=shown)


def find_checkpoint(config: TrainerConfig, storage: RunStorage) -> Path | None:
    """What the run goes on from: the newest whole checkpoint of its folder and of shared storage."""
    from infra.errors import StorageError, StorageRefused
    from trainers.checkpoint import fault, latest_whole

    if storage.uri is None:
        return latest_whole(config.output_dir)
    try:
        return storage.newest_whole(Path(config.output_dir), fault)
    except StorageRefused as error:
        raise ConfigError(str(error)) from error
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def train(payload: dict[str, Any]) -> int:
    """Run one attempt; returns the exit code."""
    import torch.distributed as dist
    from transformers.utils import logging as transformers_logging

    from infra.storage.run_storage import RunStorage
    from trainers import session
    from trainers.model import load_model

    transformers_logging.disable_progress_bar()
    fields, run = payload["config"], payload["run"]
    reporting = Reporting(fields, run, is_main=int(os.environ.get("RANK", 0)) == 0)
    storage = RunStorage(**run.get("storage") or {})
    uploads: Uploads | None = None
    with session.stop_on_sigterm() as stop:
        try:
            config = read_config(fields)
            ranks = session.join_ranks(config)
            sink = reporting.open(config) if ranks.is_main else None
            resume = ranks.rank_zero(lambda: find_checkpoint(config, storage))
            model = load_model(config, str(resume) if resume else None)
            loop = session.build_loop(
                config,
                ranks,
                model=model,
                sink=sink,
                callbacks=loggers_of(config, fields, run),
                stored_config=fields,
                stop_requested=stop,
                managed_servers=True,
            )
            loop.checkpointer.retention = Retention(config.save_total_limit, **storage.keep)
            if sink is not None and resume is not None:
                sink.resumed(int(resume.name.rpartition("-")[2]), resume)
            if sink is not None and storage.uri is not None:
                uploads = storage.uploads(Path(config.output_dir), config.save_total_limit, sink.storage_event)
                loop.checkpointer.retain = uploads.saved
            result = loop.run(resume)
        except BaseException as error:
            if uploads is not None:
                uploads.close()
            reporting.failed(error)
            raise
        if dist.is_initialized():
            dist.destroy_process_group()
        stopped = result.stopped == "signal"
        if uploads is not None:
            uploads.finish(storage.wait_s, hurry=stop)
        reporting.close(
            "KILLED" if stopped else "FINISHED", f"stopped by SIGTERM, step {result.step} is saved" if stopped else None
        )
    if ranks.is_main:
        logger.info("ended at step %d (%s); checkpoint %s", result.step, result.stopped, result.checkpoint)
    return STOPPED if stopped else 0


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--mirror"]:
        from infra.storage.mirror import serve

        return serve(lambda fields: Retention(**fields).removable)
    if len(arguments) != 1:
        print("usage: python -m trainers.main CONFIG.json", file=sys.stderr)
        return 2
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel("WARNING")
    from infra.redaction import protect_references, redact, redact_logs

    payload = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    protect_references(payload["config"])
    redact_logs()
    try:
        return train(payload)
    except Exception as error:
        print(redact(f"{traceback.format_exc()}trainer failed: {describe(error)[1]}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
