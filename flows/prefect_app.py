"""Prefect's server as uvicorn starts it here: with SQLAlchemy 2.1 its schedules would create no flow run.

Prefect (3.7) inserts scheduled runs with keys that name hybrid attributes of its tables (`state`, `data`). SQLAlchemy 2.0
ignored such keys; 2.1 refuses them ("Can't evaluate bulk DML statement"). Here they are ignored again.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from prefect.server.api.server import create_app as prefect_app
from prefect.server.database import orm_models
from sqlalchemy.ext.hybrid import hybrid_property


def create_app() -> FastAPI:
    ignore_hybrids_in_bulk_inserts()
    return prefect_app()


def ignore_hybrids_in_bulk_inserts() -> None:
    """Give every hybrid attribute of Prefect's tables that says nothing about bulk inserts a setter that drops the value."""
    for model in vars(orm_models).values():
        for name, attribute in vars(model).items() if isinstance(model, type) else ():
            if isinstance(attribute, hybrid_property) and getattr(attribute, "bulk_dml_setter", None) is None:
                attribute.bulk_dml_setter = _dropping(name)  # type: ignore[assignment]


def _dropping(name: str) -> Callable[[Any, MutableMapping[str, Any], Any], None]:
    def drop(cls: Any, mapping: MutableMapping[str, Any], value: Any) -> None:
        mapping.pop(name, None)

    return drop
