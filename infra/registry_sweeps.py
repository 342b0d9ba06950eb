"""Sweeps and their trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from infra.registry_core import AlreadyThere, NotFound, RegistryCore, claim, set_columns
from infra.registry_engine import shown_url
from infra.registry_models import Owner, new_id
from infra.registry_records import SweepRow, TrialRow


class SweepExists(AlreadyThere):
    """A sweep of this name exists already."""


class SweepNotFound(NotFound):
    """There is no sweep of this name or id."""


class Sweeps(RegistryCore):
    def create_sweep(self, name: str, config: dict[str, Any]) -> SweepRow:
        """A new PENDING sweep.

        Raises:
            SweepExists: the name is taken.
        """
        row = SweepRow(id=new_id(), name=name, config=config)
        try:
            with self._write() as session:
                session.add(row)
        except IntegrityError as error:
            raise SweepExists(f"a sweep named {name!r} exists already: resume it or choose another name") from error
        return row

    def find_sweep(self, name_or_id: str) -> SweepRow | None:
        return self._find(SweepRow, name_or_id)

    def get_sweep(self, name_or_id: str) -> SweepRow:
        """Raises `SweepNotFound`."""
        row = self.find_sweep(name_or_id)
        if row is None:
            raise SweepNotFound(f"no sweep is named {name_or_id!r} (and none has this id) in {shown_url(self.url)}")
        return row

    def list_sweeps(self) -> list[SweepRow]:
        """Newest first."""
        with self._read() as session:
            return list(session.scalars(select(SweepRow).order_by(SweepRow.created_at.desc(), SweepRow.id)))

    def update_sweep(self, sweep_id: str, **columns: Any) -> SweepRow:
        """Set columns; `owner=Owner(…)` or `owner=None` sets the three owner columns."""
        with self._write() as session:
            row = self._locked_sweep(session, sweep_id)
            set_columns(row, columns)
        return row

    def claim_sweep(self, sweep_id: str, owner: Owner, alive: Callable[[Owner], bool]) -> bool:
        """As `claim_run`: of two processes that resume a sweep at the same moment one gets True."""
        with self._write() as session:
            return claim(self._locked_sweep(session, sweep_id), owner, alive)

    def record_trial(self, sweep_id: str, number: int, key: str, **columns: Any) -> TrialRow:
        """The trial of this key: made if it is new, else with `columns` (`attempt`, `run_id`, `params`, `status`, …) set."""

        def record(session: Session) -> TrialRow:
            row = session.scalars(select(TrialRow).where(TrialRow.key == key).with_for_update()).one_or_none()
            if row is None:
                row = TrialRow(key=key, sweep_id=sweep_id, number=number)
                session.add(row)
            _set_trial(row, columns)
            return row

        return self._insert_or_update(record)

    def update_trial(self, key: str, **columns: Any) -> TrialRow:
        """Set columns of a trial.

        Raises:
            ValueError: there is no trial of this key.
        """
        with self._write() as session:
            row = session.scalars(select(TrialRow).where(TrialRow.key == key).with_for_update()).one_or_none()
            if row is None:
                raise ValueError(f"no trial has the key {key!r}")
            _set_trial(row, columns)
        return row

    def list_trials(self, sweep_id: str) -> list[TrialRow]:
        """By number, then attempt."""
        query = select(TrialRow).where(TrialRow.sweep_id == sweep_id).order_by(TrialRow.number, TrialRow.attempt, TrialRow.key)
        with self._read() as session:
            return list(session.scalars(query))

    def _locked_sweep(self, session: Session, sweep_id: str) -> SweepRow:
        row = session.scalars(select(SweepRow).where(SweepRow.id == sweep_id).with_for_update()).one_or_none()
        if row is None:
            raise SweepNotFound(f"no sweep has the id {sweep_id!r} in {shown_url(self.url)}")
        return row


def _set_trial(row: TrialRow, columns: dict[str, Any]) -> None:
    """A trial's status is the sweep's own word ("PRUNED", "COMPLETE", …), which a run has not."""
    status = columns.get("status")
    set_columns(row, {name: value for name, value in columns.items() if name != "status"})
    if status is not None:
        row.status = status
