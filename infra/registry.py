"""The registry: what runs, attempts, leases, servers and checkpoints there are. SQLite by default, any SQLAlchemy URL.

    flow process ──┐
    trainer rank 0 ├──▶ Registry(url) ──▶ registry.db (WAL)   every method is one short transaction
    reaper, CLI  ──┘

Invariants:
- a write transaction takes SQLite's write lock when it begins (BEGIN IMMEDIATE), so read-then-write never deadlocks and
  never works on stale rows; other databases get row locks or, for leases, a unique constraint;
- (kind, host, resource) of a lease is unique: of two processes that want it, one gets a row and the other gets None;
- a `Registry` may be used from several threads; after a fork make a new one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, or_, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from infra.registry_engine import WRITES, open_engine
from infra.registry_models import (
    STATUSES,
    AttemptRow,
    Base,
    CheckpointRow,
    LeaseRow,
    Owner,
    RunRow,
    RunStatus,
    ServerRow,
    new_id,
)

__all__ = [
    "AttemptRow",
    "CheckpointRow",
    "LeaseRow",
    "Owner",
    "Registry",
    "RunExists",
    "RunNotFound",
    "RunRow",
    "ServerRow",
    "default_url",
]

_SCHEMA_LOCK = 0x4C6F6F70  # Postgres advisory lock under which tables are created


class RunExists(ValueError):
    """A run of this name exists already."""


class RunNotFound(ValueError):
    """There is no run of this name or id."""


def default_url() -> str:
    """`registry.db` in the Loopwright home."""
    from infra.home import home

    return f"sqlite:///{home() / 'registry.db'}"


class Registry:
    """See the module's docstring. `url=None`: the default database; a plain path is taken as an SQLite file.

    Errors of the database itself are SQLAlchemy's (`sqlalchemy.exc.SQLAlchemyError`).
    """

    def __init__(self, url: str | Path | None = None) -> None:
        self.url = str(url) if url is not None else default_url()
        if "://" not in self.url:
            self.url = f"sqlite:///{Path(self.url).absolute()}"
        self._engine = open_engine(self.url)
        with self._engine.connect() as connection:
            wanted = [table.name for table in Base.metadata.sorted_tables]
            ready = all(self._engine.dialect.has_table(connection, name) for name in wanted)
        if not ready:
            self._create_tables()

    def _create_tables(self) -> None:
        with self._write() as session:
            if self._engine.dialect.name == "postgresql":
                session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
            Base.metadata.create_all(session.connection())

    @contextmanager
    def _write(self) -> Iterator[Session]:
        engine = self._engine.execution_options(**{WRITES: True})
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _read(self) -> Iterator[Session]:
        with Session(self._engine, expire_on_commit=False) as session:
            yield session

    def close(self) -> None:
        self._engine.dispose()

    # -- runs -----------------------------------------------------------------------------------------------------

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
            raise RunNotFound(f"no run is named {name_or_id!r} (and none has this id) in {_shown(self.url)}")
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
        if "status" in columns:
            _check_status(columns["status"])
        if "owner" in columns:
            columns |= _owner_columns(columns.pop("owner"))
        with self._write() as session:
            run = self._locked_run(session, run_id)
            for name, value in columns.items():
                if name not in RunRow.__table__.columns:
                    raise ValueError(f"a run has no column {name!r}: {', '.join(RunRow.__table__.columns.keys())}")
                setattr(run, name, value)
        return run

    def claim_run(self, run_id: str, owner: Owner, alive: Callable[[Owner], bool]) -> bool:
        """Make `owner` the run's owner, unless a process that `alive` vouches for owns it. True: it is ours now.

        Of two resumes at the same moment one gets True.
        """
        with self._write() as session:
            run = self._locked_run(session, run_id)
            if run.owner is not None and run.owner != owner and alive(run.owner):
                return False
            for name, value in _owner_columns(owner).items():
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

    def _locked_run(self, session: Session, run_id: str) -> RunRow:
        run = session.scalars(select(RunRow).where(RunRow.id == run_id).with_for_update()).one_or_none()
        if run is None:
            raise RunNotFound(f"no run has the id {run_id!r} in {_shown(self.url)}")
        return run

    # -- attempts -------------------------------------------------------------------------------------------------

    def start_attempt(self, run_id: str, number: int | None = None, resume_step: int | None = None) -> AttemptRow:
        """A new attempt; `number=None` takes the next one. An attempt started twice (same number) is opened anew."""
        with self._write() as session:
            self._locked_run(session, run_id)
            if number is None:
                last = session.scalar(select(func.max(AttemptRow.number)).where(AttemptRow.run_id == run_id))
                number = (last or 0) + 1
            row = session.get(AttemptRow, (run_id, number))
            if row is not None:
                session.delete(row)
                session.flush()
            row = AttemptRow(run_id=run_id, number=number, resume_step=resume_step)
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
        _check_status(status)
        with self._write() as session:
            self._locked_run(session, run_id)
            row = session.get(AttemptRow, (run_id, number))
            if row is None:
                raise ValueError(f"run {run_id!r} has no attempt {number}")
            if row.ended_at is None:
                row.status, row.failure_class, row.cause, row.traceback = status, failure_class, cause, traceback
                row.ended_at = time.time()
        return row

    def set_resume_step(self, run_id: str, number: int, step: int) -> None:
        """The trainer tells which checkpoint an attempt went on from."""
        with self._write() as session:
            session.execute(
                update(AttemptRow).where(AttemptRow.run_id == run_id, AttemptRow.number == number).values(resume_step=step)
            )

    def list_attempts(self, run_id: str) -> list[AttemptRow]:
        with self._read() as session:
            return list(session.scalars(select(AttemptRow).where(AttemptRow.run_id == run_id).order_by(AttemptRow.number)))

    # -- leases ---------------------------------------------------------------------------------------------------

    def insert_lease(
        self, kind: str, resource: str, owner: Owner, ttl_s: float, run_id: str | None = None, host: str | None = None
    ) -> LeaseRow | None:
        """Lease one resource; None when somebody holds it (expired or not: the reaper frees, this does not)."""
        rows = self.insert_leases(kind, [resource], 1, owner, ttl_s, run_id, host)
        return rows[0] if rows else None

    def insert_leases(
        self,
        kind: str,
        candidates: Sequence[str],
        count: int,
        owner: Owner,
        ttl_s: float,
        run_id: str | None = None,
        host: str | None = None,
    ) -> list[LeaseRow] | None:
        """Lease the first `count` free ones of `candidates`, all or none (None). `host=None`: the owner's host."""
        host = host or owner.host
        for _ in range(1 + len(candidates)):
            try:
                with self._write() as session:
                    query = select(LeaseRow.resource).where(LeaseRow.kind == kind, LeaseRow.host == host)
                    taken = set(session.scalars(query))
                    free = [resource for resource in candidates if resource not in taken][:count]
                    if len(free) < count:
                        return None
                    rows = [
                        LeaseRow(
                            id=new_id(),
                            kind=kind,
                            host=host,
                            resource=resource,
                            run_id=run_id,
                            expires_at=time.time() + ttl_s,
                            **_owner_columns(owner),
                        )
                        for resource in free
                    ]
                    session.add_all(rows)
                return rows
            except IntegrityError:
                # Another process committed one of them in between (never on SQLite, where the lock is taken first).
                with self._read() as session:
                    if run_id is not None and session.get(RunRow, run_id) is None:
                        raise RunNotFound(f"no run has the id {run_id!r} in {_shown(self.url)}") from None
        return None  # others took one of them each time we looked

    def renew(self, lease_id: str, ttl_s: float) -> bool:
        """Extend a lease; False: it is gone (reaped or deleted), stop using the resource."""
        with self._write() as session:
            result = session.execute(update(LeaseRow).where(LeaseRow.id == lease_id).values(expires_at=time.time() + ttl_s))
        return result.rowcount == 1  # type: ignore[attr-defined]

    def set_lease_child(self, lease_id: str, pid: int, start_time: float | None) -> bool:
        """Note the process that uses the resource. False: the lease is gone."""
        with self._write() as session:
            result = session.execute(
                update(LeaseRow).where(LeaseRow.id == lease_id).values(child_pid=pid, child_start_time=start_time)
            )
        return result.rowcount == 1  # type: ignore[attr-defined]

    def delete_lease(self, lease_id: str) -> bool:
        """Free the resource. False: it was free already."""
        with self._write() as session:
            result = session.execute(delete(LeaseRow).where(LeaseRow.id == lease_id))
        return result.rowcount == 1  # type: ignore[attr-defined]

    def list_leases(self, kind: str | None = None, host: str | None = None, run_id: str | None = None) -> list[LeaseRow]:
        """Oldest first; filtered by what is given."""
        query = select(LeaseRow).order_by(LeaseRow.created_at, LeaseRow.id)
        for column, value in ((LeaseRow.kind, kind), (LeaseRow.host, host), (LeaseRow.run_id, run_id)):
            if value is not None:
                query = query.where(column == value)
        with self._read() as session:
            return list(session.scalars(query))

    def expired_leases(self, now: float | None = None, host: str | None = None) -> list[LeaseRow]:
        """Leases past their time; of one host if given."""
        now = time.time() if now is None else now
        return [row for row in self.list_leases(host=host) if row.expires_at <= now]

    # -- servers and checkpoints ----------------------------------------------------------------------------------

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

    def record_checkpoint(self, run_id: str, step: int, path: str, details: dict[str, Any] | None = None) -> CheckpointRow:
        """A whole checkpoint; one written again for the same step replaces the row."""
        with self._write() as session:
            self._locked_run(session, run_id)
            row = session.get(CheckpointRow, (run_id, step)) or CheckpointRow(run_id=run_id, step=step)
            row.path, row.details, row.created_at = path, details or {}, time.time()
            session.add(row)
        return row

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


def _owner_columns(owner: Owner | None) -> dict[str, Any]:
    if owner is None:
        return {"owner_pid": None, "owner_start_time": None, "owner_host": None}
    return {"owner_pid": owner.pid, "owner_start_time": owner.start_time, "owner_host": owner.host}


def _check_status(status: str) -> None:
    if status not in STATUSES:
        raise ValueError(f"{status!r} is no run status: {', '.join(STATUSES)}")


def _shown(url: str) -> str:
    """The URL without its password."""
    return make_url(url).render_as_string(hide_password=True)
