"""What one flow run holds: the registry's row, leases, servers; and how it ends, in the registry and in MLflow.

A plain class on purpose: Prefect walks through the arguments of a task, and would copy a dataclass or a pydantic model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from flows import artifacts
from flows.config import RunConfig, trainer_fields
from flows.connections import mlflow_login, running
from flows.costs import Meter
from flows.failures import run_failed
from flows.training import NoServers, Servers, TrainerJob
from infra.gpus import visible_gpus
from infra.leases import GpuLease, LeaseManager
from infra.patience import plain
from infra.registry import Registry, RunRow
from infra.tracking import default_uri, end_run
from trainers.references import resolve


class Experiment:
    """A run while its flow works on it. `release` may be called any number of times."""

    def __init__(self, registry: Registry, config: RunConfig, run: RunRow) -> None:
        self.registry, self.config, self.run = registry, config, run
        self.leases = LeaseManager(registry)
        self.meter = Meter(registry, run.id, self.leases, config.limits, busy_gpu_s=lambda: self.servers.busy_gpu_s())
        self.servers: Servers = NoServers()
        self.trainer_gpus = GpuLease()
        self.started = time.monotonic()
        self.progress = artifacts.Progress()
        self._mlflow_linked = False
        self._servers_shown: list[dict[str, Any]] = []
        self._released = False

    @property
    def folder(self) -> Path:
        assert self.run.output_dir is not None, self.run.id
        return Path(self.run.output_dir)

    @property
    def tracking_uri(self) -> str:
        return resolve(self.config.tracking.uri) or default_uri()

    def stage(self, name: str) -> dict[str, Any] | None:
        """A finished stage's result; None if it is still to do."""
        return self.registry.get_run(self.run.id).stages.get(name)

    def done(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """Note that a stage is finished: it is not run again, whoever resumes the run."""
        self.registry.set_stage(self.run.id, name, result)
        return result

    def has_checkpoint(self) -> bool:
        return bool(self.registry.list_checkpoints(self.run.id))

    def lease_trainer_gpus(self) -> None:
        count = self.config.trainer.gpus_leased(bool(visible_gpus()))
        self.trainer_gpus = self.leases.lease_gpus(count, self.run.id)

    def job(self) -> TrainerJob:
        limit = self.config.limits.wall_clock_s
        devices = ",".join(map(str, self.trainer_gpus.devices))
        return TrainerJob(
            registry=self.registry,
            run=self.run,
            config=self.config,
            servers=self.servers,
            leases=self.leases,
            fields=trainer_fields(self.config, self.folder),
            tracking_uri=self.tracking_uri,
            environment={"CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            deadline=None if limit is None else self.started + limit,
            on_progress=self.show,
            on_attempt=self.meter.begin_attempt,
            over_limit=self.meter.over_limit,
        )

    def show(self, progress: dict[str, Any]) -> None:
        """Progress, links and servers on the flow run's page; costs to the registry."""
        self.meter.write_each_minute()
        self.progress.show(progress)
        self.show_servers()
        if not self._mlflow_linked:
            run_id = plain(self.registry).get_run(self.run.id).mlflow_run_id
            if run_id is not None:
                page = mlflow_page(self.tracking_uri, run_id)
                self._mlflow_linked = artifacts.mlflow_link(page, self.tracking_uri, run_id)

    def show_servers(self) -> None:
        """The table of servers, if it has changed."""
        if (rows := self.servers.rows()) and rows != self._servers_shown and artifacts.servers_table(rows):
            self._servers_shown = rows

    def show_end(self, trained: dict[str, Any] | None) -> None:
        """What Prefect could not take while it was away, and the checkpoint. Waits until Prefect is there."""
        artifacts.wait_for_prefect()
        artifacts.quietly(lambda: self.show(self.registry.get_run(self.run.id).progress))
        if trained is not None:
            artifacts.checkpoint_link(trained["checkpoint"], trained["step"])

    def finish(self) -> None:
        """FINISHED, in registry and MLflow."""
        self.registry.update_run(self.run.id, status="FINISHED", failure_class=None, cause=None, traceback=None)
        self._end_mlflow("FINISHED", None, None)

    def fail(self, error: Exception) -> str:
        """FAILED, with its cause, in registry and MLflow; the cause."""
        end = run_failed(error)
        cause, failure = str(end), end.failure
        self.registry.update_run(self.run.id, status="FAILED", failure_class=failure, cause=cause, traceback=end.traceback)
        self._end_mlflow("FAILED", cause, failure)
        return cause

    def kill(self, cause: str) -> None:
        """KILLED: a user or Prefect stopped it."""
        plain(self.registry).update_run(self.run.id, status="KILLED", cause=cause)  # no time to wait for a database
        self._end_mlflow("KILLED", cause, None)

    def _end_mlflow(self, status: Any, cause: str | None, failure: str | None) -> None:
        # Also for a run that never got as far as a trainer: its failure is part of the experiment's record.
        artifacts.quietly(
            lambda: end_run(self.folder, status, cause, failure, timeout_s=10.0, **self.tracking_options()), "MLflow"
        )

    def tracking_options(self) -> dict[str, Any]:
        """What a `Tracker` made by the flow needs to find or make the run's MLflow run."""
        run = self.registry.get_run(self.run.id)
        note: Callable[[str], Any] = lambda run_id: self.registry.update_run(self.run.id, mlflow_run_id=run_id)  # noqa: E731
        return {
            "uri": self.tracking_uri,
            "experiment": self.config.tracking.experiment,
            "run_name": run.name,
            "run_id": run.mlflow_run_id,
            "on_run_id": note,
        }

    def release(self) -> None:
        """Stop the servers, free the leases, give up the run."""
        if self._released:
            return
        self.servers.stop()
        self.leases.close()
        self.meter.write()
        self.registry.update_run(self.run.id, owner=None)
        self._released = True


def mlflow_page(uri: str, run_id: str) -> str | None:
    """Address of a run's page: on the tracking server, or on that of `loopwright up`; None if there is none to ask."""
    up = running()
    base = uri if uri.startswith("http") else up.mlflow_url if up and uri == default_uri() else None
    if base is None:
        return None
    try:
        answer = httpx.get(f"{base}/api/2.0/mlflow/runs/get", params={"run_id": run_id}, auth=mlflow_login(), timeout=5.0)
        answer.raise_for_status()
        experiment = answer.json()["run"]["info"]["experiment_id"]
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    return f"{base}/#/experiments/{experiment}/runs/{run_id}"
