"""What rank 0 tells about a run that has a row in the registry; `trainers.main` hands in who listens.

TrainLoop ─▶ RunSink ─┬─▶ tracker (`infra.tracking.Tracker`): metrics, rollouts, provenance
                      └─▶ writer (`infra.registry_writer.RegistryWriter`): progress, checkpoints, and by CostLog tokens
Uploads ─ events ─▶ RunSink ─▶ writer: where in shared storage a checkpoint lies
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.config import TrainerConfig
from trainers.step_source import SourceInfo
from trainers.watched import Watched

logger = logging.getLogger(__name__)
COSTS_S = 30.0


class CostLog:
    """What the trainer counts (tokens, its idle seconds) to the registry; what the flow wrote there (GPU seconds, the students'
    idle ones, money) back, to be logged. Once in `COSTS_S`."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._known: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._exchanged = float("-inf")

    def known(self, metrics: dict[str, float]) -> dict[str, float]:
        """By catalog name, as of the last look; `metrics`: those of the step, which carry what the trainer counts."""
        for name, value in metrics.items():
            if name.startswith("cost/"):
                self._counted[name.removeprefix("cost/")] = value
        if time.monotonic() - self._exchanged >= COSTS_S:
            self.exchange()
        return self._known

    def exchange(self) -> None:
        """In the registry's thread. What the trainer counts is the run's, over all attempts, so it stands under attempt 0."""
        self._exchanged = time.monotonic()
        counted, registry, run_id = dict(self._counted), self._writer.registry, self._writer.run_id

        def exchange() -> None:
            registry.add_costs(run_id, 0, counted)
            self._known = {f"cost/{kind}": value for kind, value in registry.costs(run_id).items() if kind not in counted}

        self._writer.submit(exchange)


class RunSink:
    """`MetricSink` of a run with a registry row: metrics to MLflow, progress and checkpoints to the registry.

    Args:
        fields: the config as it was written; run: see `trainers.main`.
        note_provenance: notes the dataset's fingerprint, which the flow could not know; returns the file to keep in MLflow.
    """

    def __init__(
        self,
        config: TrainerConfig,
        tracker: Any,
        writer: Any,
        fields: dict[str, Any],
        run: dict[str, Any],
        note_provenance: Callable[[SourceInfo], Path | None],
    ) -> None:
        self.config, self.tracker, self.writer, self.fields, self.attempt = config, tracker, writer, fields, run["attempt"]
        self._note_provenance = note_provenance
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
        if (file := self._note_provenance(info)) is not None:
            self.tracker.log_artifact_dir(file, "provenance")
        self.is_started = True
        self._first = (resume_step, time.monotonic())
        self.writer.submit(lambda: self.writer.registry.set_resume_step(self.writer.run_id, self.attempt, resume_step))
        self.writer.progress({"step": resume_step, "max_steps": self.config.max_steps})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log(step, {**metrics, **self.costs.known(metrics)})
        shown = ("loss", "reward", "token_accuracy", "grad_norm", "num_tokens", "perf/step_s")
        shown += ("eval/accuracy", "eval/loss", "needle/mean")
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

    def artifact(self, path: Path, name: str) -> None:
        self.tracker.log_artifact_dir(path, name)

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
