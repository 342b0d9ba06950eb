"""What every part of the registry stands on: one engine, transactions that write or read, and its errors.

The parts (`registry_runs`, `registry_leases`, …) are mixins over `RegistryCore`; `infra.registry.Registry` is all of them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from infra.registry_engine import WRITES, open_engine, shown_url
from infra.registry_models import STATUSES, Base, OwnedMixin, Owner, RunRow
from infra.registry_records import SweepRow

T = TypeVar("T")
Named = TypeVar("Named", RunRow, SweepRow)
URL_VARIABLE = "LOOPWRIGHT_REGISTRY_URL"


class NotFound(ValueError):
    """Something is asked for that the registry does not know."""


class AlreadyThere(ValueError):
    """A name is taken."""


class RunExists(AlreadyThere):
    """A run of this name exists already."""


class RunNotFound(NotFound):
    """There is no run of this name or id."""


def default_url() -> str:
    """That of `LOOPWRIGHT_REGISTRY_URL`, else `registry.db` in the Loopwright home."""
    if url := os.environ.get(URL_VARIABLE):
        return full_url(url)
    from infra.home import home

    return f"sqlite:///{home() / 'registry.db'}"


def full_url(url: str | Path) -> str:
    """A plain path is an SQLite file; an address as Postgres' own programs write it gets the driver that is used here."""
    text = str(url)
    if "://" not in text:
        return f"sqlite:///{Path(text).expanduser().absolute()}"
    scheme, _, rest = text.partition("://")
    return f"postgresql+psycopg://{rest}" if scheme in ("postgres", "postgresql") else text


class RegistryCore:
    """Errors of the database itself are SQLAlchemy's (`sqlalchemy.exc.SQLAlchemyError`)."""

    def __init__(self, url: str | Path | None = None) -> None:
        self.url = full_url(url) if url is not None else default_url()
        self._engine = open_engine(self.url)
        # One that nobody closes still gives its pooled connections back: when it is collected, or at exit.
        weakref.finalize(self, self._engine.dispose)

    @contextmanager
    def _write(self) -> Iterator[Session]:
        engine = self._engine.execution_options(**{WRITES: True})
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _read(self) -> Iterator[Session]:
        with Session(self._engine, expire_on_commit=False) as session:
            yield session

    def _insert_or_update(self, work: Callable[[Session], T]) -> T:
        """`work` in a write transaction; once more if another process inserted the same row meanwhile (not on SQLite)."""
        try:
            with self._write() as session:
                return work(session)
        except IntegrityError:
            with self._write() as session:
                return work(session)

    def close(self) -> None:
        self._engine.dispose()

    def _find(self, table: type[Named], name_or_id: str) -> Named | None:
        """A name wins over an id."""
        with self._read() as session:
            rows = session.scalars(select(table).where(or_(table.name == name_or_id, table.id == name_or_id))).all()
        return next((row for row in rows if row.name == name_or_id), rows[0] if rows else None)

    def _locked_run(self, session: Session, run_id: str) -> RunRow:
        run = session.scalars(select(RunRow).where(RunRow.id == run_id).with_for_update()).one_or_none()
        if run is None:
            raise RunNotFound(f"no run has the id {run_id!r} in {shown_url(self.url)}")
        return run


def set_columns(row: Base, columns: dict[str, Any]) -> None:
    """Set columns of a row; `owner` sets the three owner columns of one that has them.

    Raises:
        ValueError: there is no such column or status.
    """
    if "status" in columns:
        check_status(columns["status"])
    known = row.__table__.columns.keys()
    for name, value in columns.items():
        if name not in known and not (name == "owner" and isinstance(row, OwnedMixin)):
            raise ValueError(f"{row.__tablename__} have no column {name!r}: {', '.join(known)}")
        setattr(row, name, value)


def claim(row: OwnedMixin, owner: Owner, alive: Callable[[Owner], bool]) -> bool:
    """Make `owner` the row's owner, unless a process that `alive` vouches for owns it."""
    if row.owner is not None and row.owner != owner and alive(row.owner):
        return False
    row.owner = owner
    return True


def check_status(status: str) -> None:
    if status not in STATUSES:
        raise ValueError(f"{status!r} is no run status: {', '.join(STATUSES)}")
