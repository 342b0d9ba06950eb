"""One MLflow run for a run's whole life, written from a background thread.

    trainer thread                    tracking thread (Sender)                     MLflow
    log(step, …) ─┐
    commit(step) ─┼─append─▶ outbox.jsonl ─read─▶ Held ─▶ pending ─log_batch─▶ run
    close(…)     ─┘                                          └─ sent: state.json offset

Invariants:
- no call but `close` waits for the network, or for anything else than an append to a local file;
- MLflow out of reach, at the start, in the middle or at the end, costs nothing but time: the records wait in the outbox, and
  the next attempt or `flush_outbox` sends them;
- each (metric, step) has exactly one value, that of the newest attempt: values are sent when their step is committed, in
  step order, and only above the last step that MLflow has of the metric. (A run that falls back behind a *committed* step,
  because its newest checkpoint was lost, keeps the first values of the steps in between: MLflow cannot replace them.)
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from infra.outbox import Outbox, OutboxInUse
from infra.rollout_table import bounded_rows, evenly
from infra.rollout_traces import trace_record
from infra.system_metrics import SystemSampler
from infra.tracking_mlflow import Backend, MlflowBackend, files_of
from infra.tracking_params import flatten, without_secrets
from infra.tracking_sender import Sender

__all__ = ["OutboxInUse", "Tracker", "default_uri", "end_run", "flush_outbox", "register_model"]

log = logging.getLogger(__name__)

# What of a checkpoint's folder only a resume needs: it is not part of a registered model.
RESUME_FILES = (
    "resume/*",
    "rng/*",
    "scheduler.pt",
    "loop_state.json",
    "rollout_state.json",
    "rollout_buffer.npz",
    "manifest.json",
)

# What an outage may leave on the disk before rollouts are no longer written down; metrics always are.
UNSENT_BYTES = 1 << 30

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


def default_uri() -> str:
    """What MLFLOW_TRACKING_URI names, else MLflow's own store in the Loopwright home, which `loopwright up` serves too."""
    from infra.home import home

    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    return f"sqlite:///{home() / 'mlflow' / 'mlflow.db'}"


class Tracker:
    """The trainer's side of tracking. Thread-safe. Without `start` it continues what an earlier process left behind.

    Args:
        output_dir: the run's folder; the outbox lives in its `tracking/`.
        uri: MLflow's address. None: where this run was tracked before, else `default_uri()`.
        experiment, run_name: where a new MLflow run goes; None: as before.
        run_id: an MLflow run that exists already. None: the one this folder belongs to, or a new one.
        tags: set on the run.
        check: called with every metric name; raises on a name that is not in the catalog.
        on_run_id: called in the tracking thread once the MLflow run is known.
        system_metrics_s: seconds between samples of the machine's load; 0: none.
        backend: makes the connection, in the tracking thread; tests pass a fake.

    Raises:
        OutboxInUse: another live process tracks this folder.
    """

    def __init__(
        self,
        output_dir: str | Path,
        uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: dict[str, str] | None = None,
        check: Callable[[str], object] | None = None,
        on_run_id: Callable[[str], None] | None = None,
        system_metrics_s: float = 10.0,
        backend: Callable[[str, str], Backend] = MlflowBackend,
    ) -> None:
        self._outbox = Outbox(Path(output_dir) / "tracking")
        state = self._outbox.state
        self._outbox.save_state(
            uri=uri or state.get("uri") or default_uri(),
            experiment=experiment or state.get("experiment") or "loopwright",
            run_name=run_name or state.get("run_name") or Path(output_dir).absolute().name,
            run_id=run_id or state.get("run_id"),
            run_key=state.get("run_key") or uuid.uuid4().hex,
            created_ms=state.get("created_ms") or _now_ms(),
            attempts=state.get("attempts", 0),
            models=state.get("models", {}),
        )
        self._tags = {key: str(value) for key, value in (tags or {}).items()}
        self._check = check
        self._system_metrics_s = system_metrics_s
        self._sampler: SystemSampler | None = None
        self._closed = False
        self._rows_left_out = False
        self._sender = Sender(self._outbox, backend, on_run_id)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow was reached for the first time."""
        return self._outbox.state.get("run_id")

    def start(
        self,
        params: dict[str, Any],
        dataset: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        resume_step: int | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Begin an attempt.

        Args:
            params: what runs are compared by, nested or flat. They are immutable, so the first attempt's stay.
            config: all of it: `config.yaml` of the first attempt, `attempts/<n>/config.yaml` of a later one. Default: `params`.
            dataset: one or several of `{"source": path or hub id, "digest": fingerprint, "name", "rows", "split", "context"}`.
            resume_step: step of the checkpoint the attempt goes on from; 0: from the beginning. Values logged by earlier
                attempts for later steps are superseded. None: the attempt failed before it knew; nothing is superseded.
        """
        attempt = self._outbox.state["attempts"] + 1
        datasets = [dataset] if isinstance(dataset, dict) else list(dataset or [])
        self._append(
            kind="start",
            attempt=attempt,
            resume_step=resume_step,
            time_ms=_now_ms(),
            params=flatten(params) if attempt == 1 else {},
            config=without_secrets(params if config is None else config),
            datasets=datasets,
            tags=self._tags,
        )
        self._outbox.save_state(attempts=attempt)
        if self._system_metrics_s > 0:
            self._sampler = SystemSampler(self._system, self._system_metrics_s)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Values of an absolute step. Held until `commit`; logged twice before it, the later value counts.

        Raises:
            what `check` raises for a name it does not know.
        """
        if self._check is not None:
            for name in metrics:
                self._check(name)
        if metrics:
            values = {name: float(value) for name, value in metrics.items()}
            self._append(kind="metrics", step=int(step), time_ms=_now_ms(), values=values)

    def log_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Rows for the rollouts table (an even choice if there are many), long texts cut; held like metrics. A row's `trace`,
        if it has one (`infra.rollout_traces`), becomes an MLflow trace."""
        rows = evenly(rows)
        if rows and self._outbox.size - self._outbox.offset > UNSENT_BYTES:
            if not self._rows_left_out:
                log.warning("tracking: more than %d MiB wait for MLflow; rollouts to look at are left out", UNSENT_BYTES >> 20)
            self._rows_left_out = True
            return
        if rows:
            self._append(kind="rollouts", step=int(step), rows=bounded_rows(rows))
        for row in rows:
            if "trace" in row:
                trace = trace_record(row, self._outbox.state["run_name"], int(step))
                self._append(kind="trace", step=int(step), trace=trace)

    def commit(self, step: int, checkpoint: str | Path | None = None) -> None:
        """The checkpoint of `step` (its folder is noted as a pointer) is whole: what was logged up to it is final."""
        pointer = str(Path(checkpoint).absolute()) if checkpoint is not None else None
        self._append(kind="commit", step=int(step), time_ms=_now_ms(), checkpoint=pointer)

    def set_tags(self, tags: dict[str, Any]) -> None:
        """Tags that differ from what this tracker has set before."""
        changed = {key: str(value) for key, value in tags.items() if self._tags.get(key) != str(value)}
        if changed:
            self._tags.update(changed)
            self._append(kind="tags", tags=changed)

    def log_artifact_dir(self, path: str | Path, name: str | None = None) -> None:
        """Upload a folder (or file) that stays as it is until it is sent; `name`: folder in the run's artefacts."""
        self._append(kind="artifact", path=str(Path(path).absolute()), name=name)

    def log_model(self, path: str | Path, name: str, tags: dict[str, Any] | None = None) -> str:
        """Upload a model folder and register it as the next version of `name`. Returns the key of `models`.

        A checkpoint's folder is stored without its `RESUME_FILES`. `AutoModelForCausalLM.from_pretrained(
        mlflow.artifacts.download_artifacts("models:/<name>/<version>"))` loads it. The same contents registered again give
        the same version.
        """
        path = Path(path).absolute()
        key = _model_key(path, name)
        lineage = {tag: str(value) for tag, value in (tags or {}).items()}
        # A folder per key: a later model of the run must not change the files of an earlier version.
        artifact_dir = f"models/{key[:12]}"
        self._append(
            kind="model",
            path=str(path),
            exclude=RESUME_FILES,
            name=_model_name(name),
            artifact_dir=artifact_dir,
            key=key,
            tags=lineage,
        )
        return key

    @property
    def models(self) -> dict[str, dict[str, str]]:
        """Registered models by key: `{"name", "version"}`."""
        return dict(self._outbox.state["models"])

    def close(
        self, status: EndStatus | None, cause: str | None = None, failure_class: str | None = None, timeout_s: float = 20.0
    ) -> bool:
        """End the attempt; the only call that waits, as long as records get through, and `timeout_s` once they do not.

        FINISHED commits all that was logged. Otherwise values after the last commit stay in the outbox, for the run may be
        resumed, and are stored as `attempts/<n>/uncommitted_metrics.jsonl`. None leaves the run's status as it is.

        Returns:
            True: all was sent. False: a warning was logged, and the rest waits for the next attempt or `flush_outbox`.
        """
        if self._closed:
            return self._sender.drained
        self._closed = True
        if self._sampler is not None:
            self._sampler.stop()
        if status is not None:
            attempt = self._outbox.state["attempts"]
            self._append(
                kind="end", status=status, cause=cause, failure_class=failure_class, attempt=attempt, time_ms=_now_ms()
            )
        self._sender.stop(timeout_s)
        if not self._sender.drained:
            log.warning(
                "tracking: MLflow at %s is out of reach (%s); the rest waits in %s and is sent by the next attempt or "
                "by `python -m infra.tracking %s`",
                self._outbox.state["uri"],
                self._sender.last_error,
                self._outbox.path,
                self._outbox.directory.parent,
            )
        return self._sender.drained

    def _system(self, values: dict[str, float]) -> None:
        # The step of system metrics is the run's age in seconds: it grows over attempts without anything to remember.
        age_s = (_now_ms() - self._outbox.state["created_ms"]) // 1000
        self._append(kind="system", step=age_s, time_ms=_now_ms(), values=values)

    def _append(self, **record: Any) -> None:
        self._outbox.append(record)
        self._sender.wake()


def flush_outbox(output_dir: str | Path, uri: str | None = None, timeout_s: float = 20.0, **options: Any) -> bool:
    """Send what a process that is gone left in the outbox. True: nothing is left that may be sent.

    `options` are `Tracker`'s. Raises `OutboxInUse` while the run is being tracked.
    """
    return _attached(output_dir, uri, **options).close(None, timeout_s=timeout_s)


def end_run(
    output_dir: str | Path,
    status: EndStatus,
    cause: str | None = None,
    failure_class: str | None = None,
    uri: str | None = None,
    timeout_s: float = 20.0,
    **options: Any,
) -> bool:
    """End the MLflow run of a trainer that could not do it itself (it was killed). True: MLflow has it, False: it waits."""
    return _attached(output_dir, uri, **options).close(status, cause, failure_class, timeout_s)


def register_model(
    output_dir: str | Path,
    path: str | Path,
    name: str,
    tags: dict[str, Any] | None = None,
    uri: str | None = None,
    timeout_s: float = 60.0,
    **options: Any,
) -> str | None:
    """Upload and register a model folder after the trainer ended. Its version, or None: MLflow is out of reach, it waits."""
    tracker = _attached(output_dir, uri, **options)
    key = tracker.log_model(path, name, tags)
    tracker.close(None, timeout_s=timeout_s)
    return tracker.models.get(key, {}).get("version")


def _attached(output_dir: str | Path, uri: str | None, **options: Any) -> Tracker:
    return Tracker(output_dir, uri, system_metrics_s=0, **options)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _model_name(name: str) -> str:
    """Registered model names may not contain `/` and `:`."""
    return name.replace("/", "_").replace(":", "_")


def _model_key(path: Path, name: str) -> str:
    """Changes when a file of the folder does."""
    digest = hashlib.sha256(name.encode())
    for file in files_of(path, RESUME_FILES):
        stat = file.stat()
        digest.update(f"{file.relative_to(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


if __name__ == "__main__":
    import sys

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if all(list(map(flush_outbox, sys.argv[1:]))) else 1)
