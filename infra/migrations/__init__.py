"""Brings a registry's database to the version of the code, whoever opens it first.

    opening ─▶ version == HEAD ─────────────────────────────────────────▶ ready (alembic is not even imported)
                  │ older, or none
                  └─▶ lock ─▶ look again ─▶ versions/0001 … HEAD ─▶ commit

Invariants:
- all steps are one transaction, in SQLite and in Postgres (both roll back DDL), so a process that is killed leaves the version
  that was there before;
- the transaction holds the write lock (SQLite) or an advisory lock (Postgres): of several openers one migrates, and the others
  find it done;
- a step is never changed after a release: a change of the models is a new file in `versions`.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from infra.errors import InfraError
from infra.registry_engine import WRITES

HEAD = "0002"
VERSION_TABLE = "loopwright_alembic_version"  # other programs in the same database (Optuna) have their own `alembic_version`
_FIRST = "0001"
_FIRST_TABLES = {"runs", "attempts", "leases", "servers", "checkpoints"}
_LOCK = 0x4C6F6F70  # Postgres advisory lock


class SchemaRefused(InfraError, ValueError):
    """A database that this code cannot use as a registry."""

    failure_class = "user"


def bring_to_head(engine: Engine) -> None:
    """Returns when the database has the tables that the models describe.

    Raises:
        SchemaRefused: a newer Loopwright migrated it, or its tables are somebody else's.
    """
    with engine.connect() as connection:
        if version_of(connection) == HEAD:
            return
    with engine.execution_options(**{WRITES: True}).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        if version_of(connection) != HEAD:
            _migrate(connection)


def version_of(connection: Connection) -> str | None:
    """None: without tables, or from before there were versions."""
    if not connection.dialect.has_table(connection, VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()


def _migrate(connection: Connection) -> None:
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(Path(__file__).parent))
    known = {script.revision for script in scripts.walk_revisions()}
    shown = connection.engine.url.render_as_string(hide_password=True)
    version = version_of(connection)
    if version is not None and version not in known:
        raise SchemaRefused(
            f"the registry {shown} has version {version}, made by a newer Loopwright; this one knows up to {HEAD}: install the "
            "newer one here too, or restore the backup that was made before the upgrade"
        )
    context = MigrationContext.configure(
        connection,
        opts={"version_table": VERSION_TABLE, "fn": lambda revisions, _: scripts._upgrade_revs(HEAD, revisions)},
    )
    if version is None and _from_before_versions(connection, shown):
        context.stamp(scripts, _FIRST)
    with Operations.context(context):
        context.run_migrations()


def _from_before_versions(connection: Connection, shown: str) -> bool:
    """Whether the first version's tables are there."""
    inspector = inspect(connection)
    present = _FIRST_TABLES & set(inspector.get_table_names())
    if not present:
        return False
    columns = {column["name"] for column in inspector.get_columns("runs")} if "runs" in present else set()
    if present != _FIRST_TABLES or not {"stages", "progress", "output_dir"} <= columns:
        raise SchemaRefused(
            f"the database {shown} has tables of another program ({', '.join(sorted(present))}): give the registry a database "
            "of its own by LOOPWRIGHT_REGISTRY_URL"
        )
    return True
