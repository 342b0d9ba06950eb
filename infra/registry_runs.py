"""Runs in the registry."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError

from infra.registry_core import RegistryCore, RunExists, RunNotFound, owner_columns, set_columns, shown_url
from infra.registry_models import Owner, RunRow, RunStatus, new_id


class Runs(RegistryCore):
    def create_run(self, name: str, flow: str, config: dict[str, Any] | None = None, **columns: Any) -> RunRow:
        """A new PENDING run. `columns`: other `RunRow` columns (`output_dir`, `prefect_flow_run_id`, …).

        Raises:
            RunExists: the name is taken; get it by `get_run(name)` and resume it.
        """
        run = RunRow(id=new_id(), name=name, flow=flow, config=config or {}, **columns)
        try:
            with self._write() as session:
                session.add(run)
        except IntegrityError as error:
            raise RunExists(f"a run named {name!r} exists already: resume it or choose another name") from error
        return run

    def get_run(self, name_or_id: str) -> RunRow:
        """Raises `RunNotFound`. A name wins over an id."""
        run = self.find_run(name_or_id)
        if run is None:
            raise RunNotFound(f"no run is named {name_or_id!r} (and none has this id) in {shown_url(self.url)}")
        return run

    def find_run(self, name_or_id: str) -> RunRow | None:
        with self._read() as session:
            rows = session.scalars(select(RunRow).where(or_(RunRow.name == name_or_id, RunRow.id == name_or_id))).all()
        return next((row for row in rows if row.name == name_or_id), rows[0] if rows else None)

    def list_runs(self, status: RunStatus | None = None, limit: int | None = None) -> list[RunRow]:
        """Newest first."""
        query = select(RunRow).order_by(RunRow.created_at.desc(), RunRow.id)
        if status is not None:
            query = query.where(RunRow.status == status)
        with self._read() as session:
            return list(session.scalars(query.limit(limit)))

    def update_run(self, run_id: str, **columns: Any) -> RunRow:
        """Set columns of a run; `owner=Owner(…)` or `owner=None` sets the three owner columns."""
        with self._write() as session:
            run = self._locked_run(session, run_id)
            set_columns(run, columns)
        return run

    def claim_run(self, run_id: str, owner: Owner, alive: Callable[[Owner], bool]) -> bool:
        """Make `owner` the run's owner, unless a process that `alive` vouches for owns it. True: it is ours now.

        Of two resumes at the same moment one gets True.
        """
        with self._write() as session:
            run = self._locked_run(session, run_id)
            if run.owner is not None and run.owner != owner and alive(run.owner):
                return False
            for name, value in owner_columns(owner).items():
                setattr(run, name, value)
        return True

    def set_stage(self, run_id: str, stage: str, result: dict[str, Any] | None) -> None:
        """Store a finished stage's result; None forgets the stage."""
        with self._write() as session:
            run = self._locked_run(session, run_id)
            kept = {name: value for name, value in run.stages.items() if name != stage}
            run.stages = kept if result is None else {**kept, stage: result}

    def progress(self, run_id: str, values: dict[str, Any]) -> None:
        """Merge into the run's progress (step, max_steps, num_tokens, reward, eta_s, bottleneck); stamps `updated_at`."""
        with self._write() as session:
            run = self._locked_run(session, run_id)
            run.progress = {**run.progress, **values, "updated_at": time.time()}
