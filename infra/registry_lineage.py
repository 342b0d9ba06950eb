"""Artefacts, and which was made from which."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from infra.registry_core import RegistryCore
from infra.registry_records import KINDS, ArtefactKind, ArtefactRow, LineageRow


class Lineage(RegistryCore):
    def record_artefact(
        self,
        kind: ArtefactKind,
        uri: str,
        name: str = "",
        run_id: str | None = None,
        digest: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> ArtefactRow:
        """The artefact of this kind, address and digest: one row, however often it is recorded.

        Args:
            name: to show; default: the address.
            run_id: the run that made it; None: no run did (a dataset, a base model).
            digest: what tells its content from another's at the same address; None: not known.
            details: merged into what is there.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of artefact: {', '.join(KINDS)}")

        def record(session: Session) -> ArtefactRow:
            wanted = (ArtefactRow.kind == kind, ArtefactRow.uri == uri, ArtefactRow.digest == (digest or ""))
            row = session.scalars(select(ArtefactRow).where(*wanted).with_for_update()).one_or_none()
            if row is None:
                row = ArtefactRow(kind=kind, uri=uri, digest=digest or "", details={})
                session.add(row)
            row.name, row.run_id = name or row.name or uri, run_id or row.run_id
            row.details = {**row.details, **(details or {})}
            return row

        return self._insert_or_update(record)

    def link(self, parent_id: str, child_id: str) -> None:
        """`child` was made from `parent`. Linking twice is harmless."""
        if parent_id == child_id:
            raise ValueError(f"artefact {child_id!r} cannot be its own parent")

        def record(session: Session) -> None:
            if session.get(LineageRow, (parent_id, child_id)) is None:
                session.add(LineageRow(parent_id=parent_id, child_id=child_id))

        self._insert_or_update(record)

    def list_artefacts(self, run_id: str) -> list[ArtefactRow]:
        """What a run made, oldest first."""
        return self._artefacts(ArtefactRow.run_id == run_id)

    def find_artefacts(self, uri: str) -> list[ArtefactRow]:
        """Of this address, oldest first."""
        return self._artefacts(ArtefactRow.uri == uri)

    def parents(self, artefact_id: str) -> list[ArtefactRow]:
        """What an artefact was made from, one step back."""
        return self._artefacts(ArtefactRow.id.in_(select(LineageRow.parent_id).where(LineageRow.child_id == artefact_id)))

    def children(self, artefact_id: str) -> list[ArtefactRow]:
        """What was made from an artefact, one step on."""
        return self._artefacts(ArtefactRow.id.in_(select(LineageRow.child_id).where(LineageRow.parent_id == artefact_id)))

    def _artefacts(self, condition: ColumnElement[bool]) -> list[ArtefactRow]:
        query = select(ArtefactRow).where(condition).order_by(ArtefactRow.created_at, ArtefactRow.id)
        with self._read() as session:
            return list(session.scalars(query))
