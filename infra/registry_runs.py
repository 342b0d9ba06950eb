"""Runs in the registry."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import defer

from infra.registry_core import RegistryCore, RunExists, RunNotFound, claim, set_columns
from infra.registry_engine import shown_url
from infra.registry_models import Owner, RunRow, RunStatus, new_id
from infra.registry_records import SweepRow, TrialRow


def config_hash(config: Mapping[str, Any]) -> str:
    """Equal for equal configs, in whatever order their fields stand."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


class Runs(RegistryCore):
    def create_run(self, name: str, flow: str, config: dict[str, Any] | None = None, **columns: Any) -> RunRow:
        """A new PENDING run. `columns`: other `RunRow` columns (`output_dir`, `tags`, `parent_run_id`, …).

        Raises:
            RunExists: the name is taken; get it by `get_run(name)` and resume it.
            RunNotFound: there is no run `parent_run_id`.
        """
        columns.setdefault("config_hash", config_hash(config or {}))
        run = RunRow(id=new_id(), name=name, flow=flow, config=config or {}, **columns)
        try:
            with self._write() as session:
                if (parent := columns.get("parent_run_id")) is not None:
                    self._locked_run(session, parent)
                session.add(run)
        except IntegrityError as error:
            raise RunExists(f"a run named {name!r} exists already: resume it or choose another name") from error
        return run

    def get_run(self, name_or_id: str) -> RunRow:
        """Raises `RunNotFound`. A name wins over an id."""
        run = self.find_run(name_or_id)
        if run is None:
            where = f"in {shown_url(self.url)}; `loopwright runs list` shows those there are"
            raise RunNotFound(f"no run is named {name_or_id!r} (and none has this id) {where}")
        return run

    def find_run(self, name_or_id: str) -> RunRow | None:
        return self._find(RunRow, name_or_id)

    def list_runs(
        self,
        status: RunStatus | None = None,
        limit: int | None = None,
        flow: str | None = None,
        tags: Mapping[str, str] | None = None,
        sweep: str | None = None,
        parent: str | None = None,
        light: bool = False,
    ) -> list[RunRow]:
        """Newest first, those that match all that is given.

        Args:
            tags: values of tags.
            sweep: name or id; the runs of its trials.
            parent: a run's id; its children.
            light: without `config`, `stages` and `traceback`, which are large; reading them from such a row is an error.
        """
        query = select(RunRow).order_by(RunRow.created_at.desc(), RunRow.id)
        for column, value in ((RunRow.status, status), (RunRow.flow, flow), (RunRow.parent_run_id, parent)):
            if value is not None:
                query = query.where(column == value)
        if sweep is not None:
            trials = select(TrialRow.run_id).join(SweepRow, SweepRow.id == TrialRow.sweep_id)
            query = query.where(RunRow.id.in_(trials.where(or_(SweepRow.name == sweep, SweepRow.id == sweep))))
        if light:
            query = query.options(
                *(defer(column, raiseload=True) for column in (RunRow.config, RunRow.stages, RunRow.traceback))
            )
        if not tags:
            with self._read() as session:
                return list(session.scalars(query.limit(limit)))
        # Databases differ in how they address JSON, so tags are looked at here.
        with self._read() as session:
            rows = session.scalars(query.execution_options(yield_per=500))
            matching = (row for row in rows if all(row.tags.get(name) == value for name, value in tags.items()))
            return list(itertools.islice(matching, limit))

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
            return claim(self._locked_run(session, run_id), owner, alive)

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
