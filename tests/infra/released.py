"""Databases as released versions made them, with rows in them."""

from __future__ import annotations

from pathlib import Path

from infra.registry_core import full_url
from infra.registry_engine import WRITES, open_engine

SCHEMAS = Path(__file__).parent / "released_schemas"
RELEASED = sorted({path.name.split(".")[0] for path in SCHEMAS.glob("*.rows.sql")})


def execute(url: str, *statements: str) -> None:
    engine = open_engine(full_url(url)).execution_options(**{WRITES: True})
    with engine.begin() as connection:
        for statement in filter(str.strip, statements):
            connection.exec_driver_sql(statement)
    engine.dispose()


def fill(url: str, version: str) -> None:
    """A database as the released version made it, with rows in it."""
    dialect = "postgresql" if url.startswith("postgresql") else "sqlite"
    for file in (f"{version}.{dialect}.sql", f"{version}.rows.sql"):
        execute(url, *(SCHEMAS / file).read_text(encoding="utf-8").split(";\n"))
