"""The tracking thread: reads the outbox, sends what `Held` releases, notes how far it came.

    outbox.jsonl ─read─▶ Held.feed ─▶ pending ─┬─ points: above MLflow's last step of the metric ─log_batch─▶ MLflow
                                               └─ tags, artefacts, rollouts table, traces, model, status ────▶

Invariants:
- an item leaves `pending` only after its request succeeded or was rejected for good; the offset is saved when `pending` is
  empty, so a kill at any moment repeats requests and never loses one (repeated requests change nothing: `tracking_mlflow`);
- after any failure MLflow is asked again for the last step of every metric, before a point is sent.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from infra.outbox import Held, Outbox, Point, Record
from infra.rollout_table import ARTIFACT as ROLLOUTS
from infra.rollout_table import RolloutTable
from infra.tracking_mlflow import Backend, Rejected

log = logging.getLogger(__name__)

BATCH = 500  # metrics per request; the API takes 1000 entities
MAX_BACKOFF_S = 30.0
STOPPING_RETRY_S = 0.5
TRACE_TRIES = 3
REJECTED_BYTES = 16 << 20  # a server that refuses every trace must not fill the disk


class Sender:
    """See the module's docstring. The thread starts with the object and ends with `stop` or the process."""

    def __init__(self, outbox: Outbox, connect: Callable[[str, str], Backend], on_run_id: Callable[[str], None] | None) -> None:
        self._outbox = outbox
        self._connect = connect
        self._on_run_id = on_run_id
        self._backend: Backend | None = None
        self._run_id = ""
        self._last_steps: dict[str, int] | None = None  # None: ask MLflow before sending metrics
        self._held = Held()
        self._read_to = outbox.offset
        self._pending: deque[Point | Record] = deque()
        self._table = RolloutTable(outbox.directory / ROLLOUTS)
        self._table_changed = False
        self._trace_failures = 0  # of the trace to be sent next
        self._wake = threading.Event()
        self._stopping = False
        self._give_up_after_s = 0.0
        self._last_success = time.monotonic()
        self.last_error: Exception | None = None
        self.drained = False
        self._thread = threading.Thread(target=self._run, name="loopwright-tracking", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, give_up_after_s: float) -> None:
        """Returns when all is sent, or when nothing got through for `give_up_after_s`."""
        self._give_up_after_s = give_up_after_s
        self._last_success = time.monotonic()
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._outbox.close()

    def _run(self) -> None:
        failures = 0
        while True:
            stopping = self._stopping  # before looking at the outbox: what was appended before it is seen
            try:
                self._drain()
                failures, self.last_error = 0, None
                if stopping:
                    self._outbox.save_state(drained=self._read_to)
                    self.drained = True
                    return
                self._wake.wait()
            except Exception as error:
                # Whatever was on its way may have arrived: ask for the last steps before sending again.
                failures, self.last_error, self._last_steps = failures + 1, error, None
                if failures == 1:
                    log.warning(
                        "tracking: %s: %s; training goes on, records wait in %s", type(error).__name__, error, self._outbox.path
                    )
                if self._stopping and time.monotonic() - self._last_success > self._give_up_after_s:
                    return
                self._wait_to_retry(failures)
            self._wake.clear()

    def _wait_to_retry(self, failures: int) -> None:
        until = time.monotonic() + min(2.0 ** (failures - 1), MAX_BACKOFF_S)
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()
        if self._stopping:
            time.sleep(min(STOPPING_RETRY_S, self._give_up_after_s))

    def _drain(self) -> None:
        backend = self._connected()
        while True:
            while self._pending:
                self._send_next(backend)
            if self._table_changed:
                self._table.save()
                self._tolerate(lambda: backend.log_table(self._run_id, self._table.path))
                self._table_changed = False
            needed_from = self._held.needed_from(self._read_to)
            if needed_from != self._outbox.offset:
                self._outbox.save_state(offset=needed_from)
                self._outbox.compact()
            records = self._outbox.read(self._read_to)
            if not records:
                return
            for record, end in records:
                self._pending.extend(self._held.feed(record, self._read_to))
                self._read_to = end

    def _connected(self) -> Backend:
        state = self._outbox.state
        if self._backend is None:
            self._backend = self._connect(state["uri"], state["experiment"])
        if not self._run_id:
            tags = {"mlflow.runName": state["run_name"], "mlflow.source.name": "loopwright"}
            self._run_id = self._backend.open_run(state["run_id"], state["run_key"], state["created_ms"], tags)
            self._outbox.save_state(run_id=self._run_id)
            self._tell_run_id()
        if self._last_steps is None:
            self._last_steps = self._backend.last_steps(self._run_id)
        return self._backend

    def _tell_run_id(self) -> None:
        try:
            if self._on_run_id is not None:
                self._on_run_id(self._run_id)
        except Exception as error:  # the callback's trouble is not MLflow's
            log.warning("tracking: the MLflow run id %s could not be passed on: %s", self._run_id, error)

    def _send_next(self, backend: Backend) -> None:
        """Send the first pending item, or as many points as fit a batch, then forget them."""
        first = self._pending[0]
        if isinstance(first, Point):
            batch: list[Point] = []
            for item in self._pending:
                if not isinstance(item, Point) or len(batch) == BATCH:
                    break
                batch.append(item)
            self._send_points(backend, batch)
            sent = len(batch)
        else:
            self._tolerate(lambda: self._send_record(backend, first), first)
            sent = 1
        for _ in range(sent):
            self._pending.popleft()
        self._last_success = time.monotonic()

    def _send_points(self, backend: Backend, batch: list[Point]) -> None:
        last_steps = self._last_steps
        assert last_steps is not None, "points are sent only when connected"
        new: list[Point] = []
        for point in batch:
            if point.step > last_steps.get(point.name, -1):
                new.append(point)
                last_steps[point.name] = point.step
        try:
            if new:
                backend.log_points(self._run_id, new)
        except Rejected as error:
            # One bad value must not take the others along: send them one by one.
            for point in new:
                if len(new) == 1:
                    self._rejected(error, point._asdict())
                else:
                    self._tolerate(lambda point=point: backend.log_points(self._run_id, [point]), point._asdict())

    def _send_record(self, backend: Backend, record: Record) -> None:
        run_id = self._run_id
        match record["kind"]:
            case "start":
                self._send_start(backend, record)
            case "rollouts":
                self._table.put(record["step"], record["rows"])
                self._table_changed = True
            case "trace":
                self._send_trace(backend, record)
            case "commit":
                if record["checkpoint"] is not None:
                    pointer = {"step": record["step"], "path": record["checkpoint"], "time_ms": record["time_ms"]}
                    backend.log_text(run_id, json.dumps(pointer, indent=1), f"checkpoints/checkpoint-{record['step']}.json")
                    backend.set_tags(run_id, {"loopwright.checkpoint": record["checkpoint"]})
            case "tags":
                backend.set_tags(run_id, record["tags"])
            case "artifact":
                backend.log_path(run_id, Path(record["path"]), record["name"])
            case "model":
                backend.log_path(run_id, Path(record["path"]), record["artifact_dir"], record["exclude"])
                version = backend.register_model(run_id, record["name"], record["artifact_dir"], record["key"], record["tags"])
                models = {**self._outbox.state["models"], record["key"]: {"name": record["name"], "version": version}}
                self._outbox.save_state(models=models)
            case "end":
                self._send_end(backend, record)

    def _send_start(self, backend: Backend, record: Record) -> None:
        import yaml

        run_id, attempt = self._run_id, record["attempt"]
        if record.get("superseded"):
            log.info("tracking: what the last attempt logged for steps %s is superseded", _span(record["superseded"]))
        if record["resume_step"] is not None:
            self._table.drop_after(record["resume_step"])
        backend.set_status(run_id, "RUNNING", None)
        attempt_tags = {
            "loopwright.attempt": str(attempt),
            "loopwright.resume_step": "" if record["resume_step"] is None else str(record["resume_step"]),
            "loopwright.cause": "",
            "loopwright.failure_class": "",
        }
        backend.set_tags(run_id, {**record["tags"], **attempt_tags})
        config = yaml.safe_dump(json.loads(json.dumps(record["config"], default=str)), sort_keys=False, allow_unicode=True)
        backend.log_text(run_id, config, "config.yaml" if attempt == 1 else f"attempts/{attempt}/config.yaml")
        if record["datasets"]:
            self._tolerate(lambda: backend.log_datasets(run_id, record["datasets"]), record)
        if record["params"]:
            backend.log_params(run_id, record["params"])

    def _send_trace(self, backend: Backend, record: Record) -> None:
        try:
            backend.log_trace(self._run_id, record["trace"])
        except Rejected:
            raise
        except Exception as error:
            # A server that answers everything but this must not keep the metrics behind it waiting for ever.
            self._trace_failures += 1
            if self._trace_failures < TRACE_TRIES:
                raise
            self._trace_failures = 0
            raise Rejected(f"not taken in {TRACE_TRIES} tries: {error}") from error
        self._trace_failures = 0

    def _send_end(self, backend: Backend, record: Record) -> None:
        run_id = self._run_id
        if record.get("uncommitted"):
            lines = "".join(json.dumps(point) + "\n" for point in record["uncommitted"])
            backend.log_text(run_id, lines, f"attempts/{record['attempt']}/uncommitted_metrics.jsonl")
        tags = {"loopwright.cause": record["cause"] or "", "loopwright.failure_class": record["failure_class"] or ""}
        backend.set_tags(run_id, tags)
        backend.set_status(run_id, record["status"], record["time_ms"])

    def _tolerate(self, send: Callable[[], None], record: Record | None = None) -> None:
        try:
            send()
        except Rejected as error:
            self._rejected(error, record or {})

    def _rejected(self, error: Rejected, record: Record) -> None:
        path = self._outbox.directory / "rejected.jsonl"
        log.warning("tracking: MLflow does not take this, kept in %s: %s", path, error)
        with path.open("a", encoding="utf-8") as file:
            if file.tell() < REJECTED_BYTES:
                file.write(json.dumps({"error": str(error), "record": record}, default=str) + "\n")


def _span(steps: list[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
