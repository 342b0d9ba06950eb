"""Connections to the registry's database, so that many processes may write at once.

SQLite: WAL, a busy timeout, one connection per transaction, and BEGIN IMMEDIATE for transactions marked with `WRITES`: they
take the write lock when they begin, where a deferred one could find at its first write that what it read is stale.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import NoSuchModuleError, OperationalError
from sqlalchemy.pool import NullPool

from infra.errors import InfraError

BUSY_TIMEOUT_S = 60.0
WRITES = "loopwright_writes"  # execution option of connections that will write


def shown_url(url: str) -> str:
    """The URL without its password, for messages."""
    return make_url(url).render_as_string(hide_password=True)


def open_engine(url: str) -> Engine:
    """The engine of an SQLAlchemy URL; an SQLite file and its folders are made."""
    return _sqlite_engine(url) if url.startswith("sqlite") else _server_engine(url)


def _finite(value: Any) -> Any:
    """JSON knows no NaN (Postgres refuses it): null instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _to_json(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _server_engine(url: str) -> Engine:
    try:
        return create_engine(url, pool_pre_ping=True, json_serializer=_to_json)
    except ModuleNotFoundError as error:
        raise InfraError(
            f"{shown_url(url)} needs the Python package {error.name}: pip install 'loopwright[postgres]'"
        ) from error
    except NoSuchModuleError as error:
        raise InfraError(f"{shown_url(url)} is no address of a database: write sqlite:///FILE or postgresql://…") from error


def _sqlite_engine(url: str) -> Engine:
    database = make_url(url).database
    if database and database != ":memory:":
        Path(database).parent.mkdir(parents=True, exist_ok=True)
    # No pool: a connection belongs to one transaction, so threads never share one and files are closed when idle.
    options: dict[str, Any] = {} if database in (None, "", ":memory:") else {"poolclass": NullPool}
    engine = create_engine(url, json_serializer=_to_json, connect_args={"timeout": BUSY_TIMEOUT_S}, **options)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would be a deferred one
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        write = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    _use_wal(engine)
    return engine


def _use_wal(engine: Engine) -> None:
    """Switch the file to WAL, which stays with the file. Several first openers collide here despite the busy timeout."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("PRAGMA journal_mode=WAL")
            return
        except Exception as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise OperationalError("PRAGMA journal_mode=WAL", None, error) from error
            time.sleep(0.02)
        finally:
            raw.close()
