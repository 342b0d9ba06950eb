"""Runs, attempts, leases, servers, checkpoints: what registries had before they had versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("flow", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("failure_class", sa.String()),
        sa.Column("cause", sa.Text()),
        sa.Column("traceback", sa.Text()),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("output_dir", sa.String()),
        sa.Column("mlflow_run_id", sa.String()),
        sa.Column("prefect_flow_run_id", sa.String()),
        sa.Column("stages", sa.JSON(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        *_owner(),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("failure_class", sa.String()),
        sa.Column("cause", sa.Text()),
        sa.Column("traceback", sa.Text()),
        sa.Column("resume_step", sa.Integer()),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("resource", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="SET NULL")),
        sa.Column("child_pid", sa.Integer()),
        sa.Column("child_start_time", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        *_owner(),
        sa.UniqueConstraint("kind", "host", "resource"),
    )
    op.create_table(
        "servers",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="CASCADE")),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer()),
        sa.Column("lease_id", sa.String()),
        sa.Column("log_path", sa.String()),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("exit", sa.String()),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )


def _owner() -> tuple[sa.Column, ...]:
    return (
        sa.Column("owner_pid", sa.Integer()),
        sa.Column("owner_start_time", sa.Double()),
        sa.Column("owner_host", sa.String()),
    )
