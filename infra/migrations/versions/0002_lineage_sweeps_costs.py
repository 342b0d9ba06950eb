"""Artefacts and lineage, sweeps and trials, costs; tags, parents and hosts; indices for what lists are filtered by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    _new_columns()
    _lineage()
    _sweeps()
    op.create_table(
        "costs",
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("attempt", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(), primary_key=True),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )


def _new_columns() -> None:
    op.add_column("runs", sa.Column("config_hash", sa.String()))
    op.add_column("runs", _json("tags"))
    # In SQL, because a foreign key is part of the column in SQLite only if it is written with it.
    op.execute("ALTER TABLE runs ADD COLUMN parent_run_id VARCHAR REFERENCES runs (id) ON DELETE SET NULL")
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
    op.create_index("ix_runs_status", "runs", ["status", "created_at"])
    op.create_index("ix_runs_flow", "runs", ["flow", "created_at"])
    op.create_index("ix_runs_parent_run_id", "runs", ["parent_run_id"])
    op.create_index("ix_runs_prefect_flow_run_id", "runs", ["prefect_flow_run_id"])
    op.add_column("attempts", sa.Column("host", sa.String()))
    op.add_column("attempts", sa.Column("prefect_flow_run_id", sa.String()))
    op.create_index("ix_servers_run_id", "servers", ["run_id"])
    op.add_column("checkpoints", sa.Column("uri", sa.String()))
    op.add_column("checkpoints", sa.Column("pinned", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("checkpoints", _json("metrics"))


def _lineage() -> None:
    op.create_table(
        "artefacts",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="SET NULL")),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        _json("details"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.UniqueConstraint("kind", "uri", "digest", name="uq_artefacts_kind_uri_digest"),
    )
    op.create_index("ix_artefacts_run_id", "artefacts", ["run_id"])
    op.create_table(
        "lineage",
        sa.Column("parent_id", sa.String(), sa.ForeignKey("artefacts.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("child_id", sa.String(), sa.ForeignKey("artefacts.id", ondelete="CASCADE"), primary_key=True),
    )
    op.create_index("ix_lineage_child_id", "lineage", ["child_id"])


def _sweeps() -> None:
    op.create_table(
        "sweeps",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("name", sa.String(), nullable=False),
        _json("config"),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("cause", sa.String()),
        sa.Column("mlflow_run_id", sa.String()),
        sa.Column("prefect_flow_run_id", sa.String()),
        _json("result"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("owner_pid", sa.Integer()),
        sa.Column("owner_start_time", sa.Double()),
        sa.Column("owner_host", sa.String()),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "sweep_trials",
        sa.Column("key", sa.String(), primary_key=True),
        sa.Column("sweep_id", sa.String(), sa.ForeignKey("sweeps.id", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="SET NULL")),
        _json("params"),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
    )
    op.create_index("ix_sweep_trials_sweep_id", "sweep_trials", ["sweep_id", "number"])
    op.create_index("ix_sweep_trials_run_id", "sweep_trials", ["run_id"])


def _json(name: str) -> sa.Column:
    return sa.Column(name, sa.JSON(), nullable=False, server_default=sa.text("'{}'"))
