"""Attempts of runs: each start of a trainer, and how it ended."""

from __future__ import annotations

import socket
import time

from sqlalchemy import func, select, update

from infra.registry_core import RegistryCore, check_status
from infra.registry_models import AttemptRow, RunStatus


class Attempts(RegistryCore):
    def start_attempt(self, run_id: str, number: int | None = None, resume_step: int | None = None) -> AttemptRow:
        """A new attempt; `number=None` takes the next one. An attempt started twice (same number) is opened anew."""
        with self._write() as session:
            run = self._locked_run(session, run_id)
            if number is None:
                last = session.scalar(select(func.max(AttemptRow.number)).where(AttemptRow.run_id == run_id))
                number = (last or 0) + 1
            row = session.get(AttemptRow, (run_id, number))
            if row is not None:
                session.delete(row)
                session.flush()
            row = AttemptRow(run_id=run_id, number=number, resume_step=resume_step)
            row.host, row.prefect_flow_run_id = socket.gethostname(), run.prefect_flow_run_id
            session.add(row)
        return row

    def end_attempt(
        self,
        run_id: str,
        number: int,
        status: RunStatus,
        failure_class: str | None = None,
        cause: str | None = None,
        traceback: str | None = None,
    ) -> AttemptRow:
        """Close an attempt. The first to close it wins: a trainer that fails knows more than the flow that sees its exit code.

        Returns the row as it then stands.
        """
        check_status(status)
        with self._write() as session:
            self._locked_run(session, run_id)
            row = session.get(AttemptRow, (run_id, number))
            if row is None:
                raise ValueError(f"run {run_id!r} has no attempt {number}")
            if row.ended_at is None:
                row.status, row.failure_class, row.cause, row.traceback = status, failure_class, cause, traceback
                row.ended_at = time.time()
        return row

    def add_to_cause(self, run_id: str, number: int, line: str) -> None:
        """What the flow made of a failure, below the trainer's own account of it."""
        with self._write() as session:
            self._locked_run(session, run_id)
            if (row := session.get(AttemptRow, (run_id, number))) is not None:
                row.cause = f"{row.cause}\n{line}" if row.cause else line

    def set_resume_step(self, run_id: str, number: int, step: int) -> None:
        """The trainer tells which checkpoint an attempt went on from."""
        with self._write() as session:
            session.execute(
                update(AttemptRow).where(AttemptRow.run_id == run_id, AttemptRow.number == number).values(resume_step=step)
            )

    def list_attempts(self, run_id: str) -> list[AttemptRow]:
        with self._read() as session:
            return list(session.scalars(select(AttemptRow).where(AttemptRow.run_id == run_id).order_by(AttemptRow.number)))
