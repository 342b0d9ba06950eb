"""The registry on SQLite and on Postgres: a test that asks for `registry`, `registry_url` or `database` runs on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.registry import Registry


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes empty databases."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_database")
    numbers = iter(range(100))
    return lambda: str(tmp_path / "new" / f"registry-{next(numbers)}.db")


@pytest.fixture
def registry_url(database: Callable[[], str]) -> str:
    """Of an empty database."""
    return database()


@pytest.fixture
def registry(registry_url: str) -> Iterator[Registry]:
    registry = Registry(registry_url)
    yield registry
    registry.close()
