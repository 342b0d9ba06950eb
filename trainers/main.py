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
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from infra.patience import open_patiently, patient
from infra.registry_writer import CLOSE_S, RegistryWriter
from trainers.config import TrainerConfig, TrainerConfigUnion
from trainers.errors import CheckpointError, ConfigError, LoopwrightError, full_traceback
from trainers.metrics import spec_of
from trainers.references import resolve
from trainers.retention import Retention
from trainers.run_sink import RunSink
from trainers.step_source import SourceInfo
from trainers.watched import Watched

if TYPE_CHECKING:
    from infra.storage.run_storage import RunStorage
    from infra.storage.uploads import Uploads

logger = logging.getLogger(__name__)
STOPPED = 143


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


def note_provenance(folder: Path, attempt: int, info: SourceInfo) -> Path | None:
    """Add the dataset's fingerprint to the attempt's facts; whole now, they go to MLflow and into checkpoints."""
    from infra import provenance

    try:
        provenance.note(folder, attempt, fingerprint=info.fingerprint, rows=info.prompts)
    except OSError as error:
        logger.warning("the dataset's fingerprint is not noted in %s: %s", folder / provenance.FILE, error)
    file = provenance.attempt_file(folder, attempt)
    return file if file.is_file() else None


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
        noted = partial(note_provenance, Path(config.output_dir), run["attempt"])
        self.sink = RunSink(config, self.tracker, self.writer, self.fields, run, noted)
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
