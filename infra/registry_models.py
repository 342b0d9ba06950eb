"""Tables of the registry. Times are unix seconds (UTC), ids are uuid4 hex.

    runs ─┬─ attempts       one row per start of the trainer
          ├─ checkpoints    whole checkpoints, by step
          ├─ servers        vLLM servers started for the run (or for nobody: `loopwright serve`)
          ├─ leases         who may use which port or GPU, on which host, until when
          └─ …              lineage, sweeps and costs: `infra.registry_records`

Rows returned by `Registry` are detached: plain data that stays readable after the session is closed. A change here needs a
migration (`infra/migrations`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import JSON, Double, ForeignKey, Index, Text, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

RunStatus = Literal["PENDING", "RUNNING", "FINISHED", "FAILED", "KILLED"]
STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that outlives nothing it owns. A pid alone is reused by the system; pid and start time are not.

    `start_time` is `infra.process.process_start_time(pid)`; 0.0 where the system does not tell.
    """

    pid: int
    start_time: float
    host: str

    @staticmethod
    def current() -> Owner:
        """This process."""
        from infra.process import process_start_time

        return Owner(os.getpid(), process_start_time(os.getpid()) or 0.0, socket.gethostname())


def new_id() -> str:
    return uuid.uuid4().hex


class Base(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: JSON, float: Double}  # noqa: RUF012 - SQLAlchemy's own contract for this name


def json_column() -> Any:
    """A dictionary that rows from before the column have empty."""
    return mapped_column(default=dict, server_default=text("'{}'"))


class OwnedMixin:
    """Columns that name the owning process; all None: nobody owns the row."""

    owner_pid: Mapped[int | None]
    owner_start_time: Mapped[float | None]
    owner_host: Mapped[str | None]

    @property
    def owner(self) -> Owner | None:
        if self.owner_pid is None:
            return None
        return Owner(self.owner_pid, self.owner_start_time or 0.0, self.owner_host or "")

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        self.owner_pid = owner.pid if owner else None
        self.owner_start_time = owner.start_time if owner else None
        self.owner_host = owner.host if owner else None


class RunRow(OwnedMixin, Base):
    """One experiment for its whole life, however often it is resumed."""

    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_created_at", "created_at"),
        Index("ix_runs_status", "status", "created_at"),
        Index("ix_runs_flow", "flow", "created_at"),
        Index("ix_runs_parent_run_id", "parent_run_id"),
        Index("ix_runs_prefect_flow_run_id", "prefect_flow_run_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    flow: Mapped[str]
    status: Mapped[str] = mapped_column(default="PENDING")
    failure_class: Mapped[str | None]
    cause: Mapped[str | None] = mapped_column(Text)
    traceback: Mapped[str | None] = mapped_column(Text)
    config: Mapped[dict[str, Any]] = mapped_column(default=dict)
    output_dir: Mapped[str | None]
    mlflow_run_id: Mapped[str | None]
    prefect_flow_run_id: Mapped[str | None]
    stages: Mapped[dict[str, Any]] = mapped_column(default=dict)  # stage name → result; a stage that is here is done
    progress: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)
    updated_at: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)
    config_hash: Mapped[str | None]  # equal for runs that compute the same; None: from before the column
    tags: Mapped[dict[str, Any]] = json_column()
    parent_run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))  # of a trial or a stage


class AttemptRow(Base):
    """One start of the trainer within a run, numbered from 1."""

    __tablename__ = "attempts"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="RUNNING")
    failure_class: Mapped[str | None]
    cause: Mapped[str | None] = mapped_column(Text)
    traceback: Mapped[str | None] = mapped_column(Text)
    resume_step: Mapped[int | None]  # checkpoint it went on from; None: from the start, or not known yet
    started_at: Mapped[float] = mapped_column(default=time.time)
    ended_at: Mapped[float | None]
    host: Mapped[str | None]
    prefect_flow_run_id: Mapped[str | None]


class LeaseRow(OwnedMixin, Base):
    """Exclusive use of one resource of one host. Valid while `expires_at` lies ahead and the owner lives."""

    __tablename__ = "leases"
    __table_args__ = (UniqueConstraint("kind", "host", "resource"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    kind: Mapped[str]  # "port", "gpu", …
    host: Mapped[str]
    resource: Mapped[str]  # port number, device index, …
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))
    child_pid: Mapped[int | None]  # of the first version, as the next; nothing writes them
    child_start_time: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=time.time)
    expires_at: Mapped[float]


class ServerRow(Base):
    """A vLLM server that was started."""

    __tablename__ = "servers"
    __table_args__ = (Index("ix_servers_run_id", "run_id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    name: Mapped[str]
    url: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int | None]
    lease_id: Mapped[str | None]
    log_path: Mapped[str | None]
    details: Mapped[dict[str, Any]] = mapped_column(default=dict)  # model, capabilities
    started_at: Mapped[float] = mapped_column(default=time.time)
    ended_at: Mapped[float | None]
    exit: Mapped[str | None]  # "exit code 1", "killed by SIGKILL"


class CheckpointRow(Base):
    """A whole checkpoint. The folder itself is the truth; this row is for listing and links."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str]
    details: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)
    uri: Mapped[str | None]  # where it lies in shared storage; None: in the local folder only
    pinned: Mapped[bool] = mapped_column(default=False, server_default=false())  # a copy of the marker beside the checkpoint
    metrics: Mapped[dict[str, Any]] = json_column()  # of its step, by catalog name: what "best" is chosen by
