"""vLLM servers that were started, and whole checkpoints."""

from __future__ import annotations

import socket
import time
from typing import Any

from sqlalchemy import delete, select, update

from infra.registry_core import RegistryCore, set_columns
from infra.registry_models import CheckpointRow, ServerRow, new_id


class ServersAndCheckpoints(RegistryCore):
    def record_server(self, run_id: str | None, name: str, url: str, pid: int | None, **columns: Any) -> ServerRow:
        """A server that was started. `columns`: `lease_id`, `log_path`, `details`, `host` (default: this host)."""
        columns.setdefault("host", socket.gethostname())
        row = ServerRow(id=new_id(), run_id=run_id, name=name, url=url, pid=pid, **columns)
        with self._write() as session:
            session.add(row)
        return row

    def end_server(self, server_id: str, exit: str | None) -> None:
        """Note how a server ended; the first to say so wins."""
        with self._write() as session:
            session.execute(
                update(ServerRow)
                .where(ServerRow.id == server_id, ServerRow.ended_at.is_(None))
                .values(ended_at=time.time(), exit=exit)
            )

    def list_servers(self, run_id: str | None = None, running: bool = False) -> list[ServerRow]:
        """Oldest first; `run_id=None`: of all runs; `running`: only those without an end."""
        query = select(ServerRow).order_by(ServerRow.started_at, ServerRow.id)
        if run_id is not None:
            query = query.where(ServerRow.run_id == run_id)
        if running:
            query = query.where(ServerRow.ended_at.is_(None))
        with self._read() as session:
            return list(session.scalars(query))

    def record_checkpoint(
        self,
        run_id: str,
        step: int,
        path: str,
        details: dict[str, Any] | None = None,
        uri: str | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> CheckpointRow:
        """A whole checkpoint; one written again for the same step replaces the row, but stays pinned.

        Args:
            uri: where it lies in shared storage; None: in the local folder only.
            metrics: of its step, by catalog name.
        """
        with self._write() as session:
            self._locked_run(session, run_id)
            row = session.get(CheckpointRow, (run_id, step)) or CheckpointRow(run_id=run_id, step=step)
            row.path, row.details, row.created_at = path, details or {}, time.time()
            row.uri, row.metrics = uri, metrics or {}
            session.add(row)
        return row

    def update_checkpoint(self, run_id: str, step: int, **columns: Any) -> bool:
        """Set columns (`uri`, `pinned`, `metrics`, …). False: there is no such row."""
        with self._write() as session:
            row = session.scalars(
                select(CheckpointRow).where(CheckpointRow.run_id == run_id, CheckpointRow.step == step).with_for_update()
            ).one_or_none()
            if row is None:
                return False
            set_columns(row, columns)
        return True

    def forget_checkpoint(self, run_id: str, step: int) -> None:
        """The checkpoint was deleted by retention."""
        with self._write() as session:
            session.execute(delete(CheckpointRow).where(CheckpointRow.run_id == run_id, CheckpointRow.step == step))

    def list_checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """By step."""
        with self._read() as session:
            return list(
                session.scalars(select(CheckpointRow).where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.step))
            )
