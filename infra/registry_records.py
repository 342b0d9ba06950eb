"""Tables of what runs leave behind: artefacts and where they came from, sweeps and their trials, costs.

    artefacts ── lineage (parent → child) ── artefacts     a dataset, a base model ─▶ a checkpoint ─▶ a registered model
    sweeps ── sweep_trials ── runs                         a trial is a run; one that is tried again is another row
    runs ── costs                                          by attempt, so that writing one twice counts once

The table of trials is `sweep_trials`, because Optuna, which may use the same database, has one that is called `trials`.
"""

from __future__ import annotations

import time
from typing import Any, Literal, get_args

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from infra.registry_models import Base, OwnedMixin, json_column, new_id

ArtefactKind = Literal["checkpoint", "model", "adapter", "dataset", "base_model"]
KINDS: tuple[ArtefactKind, ...] = get_args(ArtefactKind)


class ArtefactRow(Base):
    """Something a run read or made. `digest` tells two contents of one address apart; "": not known."""

    __tablename__ = "artefacts"
    __table_args__ = (
        UniqueConstraint("kind", "uri", "digest", name="uq_artefacts_kind_uri_digest"),
        Index("ix_artefacts_run_id", "run_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))  # that made it; None: no run did
    kind: Mapped[str]
    name: Mapped[str]
    uri: Mapped[str]
    digest: Mapped[str] = mapped_column(default="")
    details: Mapped[dict[str, Any]] = json_column()
    created_at: Mapped[float] = mapped_column(default=time.time)


class LineageRow(Base):
    """`child` was made from `parent`."""

    __tablename__ = "lineage"
    __table_args__ = (Index("ix_lineage_child_id", "child_id"),)

    parent_id: Mapped[str] = mapped_column(ForeignKey("artefacts.id", ondelete="CASCADE"), primary_key=True)
    child_id: Mapped[str] = mapped_column(ForeignKey("artefacts.id", ondelete="CASCADE"), primary_key=True)


class SweepRow(OwnedMixin, Base):
    """One search over a space of configs, however often it is resumed. `status` is one of a run's."""

    __tablename__ = "sweeps"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    config: Mapped[dict[str, Any]] = json_column()
    status: Mapped[str] = mapped_column(default="PENDING")
    cause: Mapped[str | None]
    mlflow_run_id: Mapped[str | None]
    prefect_flow_run_id: Mapped[str | None]
    result: Mapped[dict[str, Any]] = json_column()
    created_at: Mapped[float] = mapped_column(default=time.time)
    updated_at: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)


class TrialRow(Base):
    """One trial of a sweep. `key` ("sweep:trial:attempt") makes starting it idempotent."""

    __tablename__ = "sweep_trials"
    __table_args__ = (Index("ix_sweep_trials_sweep_id", "sweep_id", "number"), Index("ix_sweep_trials_run_id", "run_id"))

    key: Mapped[str] = mapped_column(primary_key=True)
    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweeps.id", ondelete="CASCADE"))
    number: Mapped[int]
    attempt: Mapped[int] = mapped_column(default=1)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))
    params: Mapped[dict[str, Any]] = json_column()
    status: Mapped[str] = mapped_column(default="RUNNING")
    value: Mapped[float | None]
    created_at: Mapped[float] = mapped_column(default=time.time)
    ended_at: Mapped[float | None]


class CostRow(Base):
    """What one attempt of a run has used of one kind so far, e.g. 12.5 s of `gpu_s/trainer`. Attempt 0: the flow itself."""

    __tablename__ = "costs"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
    unit: Mapped[str]
    updated_at: Mapped[float] = mapped_column(default=time.time)
