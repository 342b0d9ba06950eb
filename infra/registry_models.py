"""Tables of the registry. Times are unix seconds (UTC), ids are uuid4 hex.

    runs ─┬─ attempts       one row per start of the trainer
          ├─ checkpoints    whole checkpoints, by step
          ├─ servers        vLLM servers started for the run (or for nobody: `loopwright serve`)
          └─ leases         who may use which port or GPU, on which host, until when

Rows returned by `Registry` are detached: plain data that stays readable after the session is closed.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import JSON, ForeignKey, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

RunStatus = Literal["PENDING", "RUNNING", "FINISHED", "FAILED", "KILLED"]
STATUSES: tuple[RunStatus, ...] = ("PENDING", "RUNNING", "FINISHED", "FAILED", "KILLED")


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
    type_annotation_map = {dict[str, Any]: JSON}  # noqa: RUF012 - SQLAlchemy's own contract for this name


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


class RunRow(OwnedMixin, Base):
    """One experiment for its whole life, however often it is resumed."""

    __tablename__ = "runs"

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


class LeaseRow(OwnedMixin, Base):
    """Exclusive use of one resource of one host. Valid while `expires_at` lies ahead and the owner lives."""

    __tablename__ = "leases"
    __table_args__ = (UniqueConstraint("kind", "host", "resource"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    kind: Mapped[str]  # "port", "gpu", …
    host: Mapped[str]
    resource: Mapped[str]  # port number, device index, …
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))
    child_pid: Mapped[int | None]
    child_start_time: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=time.time)
    expires_at: Mapped[float]


class ServerRow(Base):
    """A vLLM server that was started."""

    __tablename__ = "servers"

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
