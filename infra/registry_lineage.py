"""Artefacts, and which was made from which."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
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

    def list_artefacts(self, run_id: str | None = None, kind: str | None = None) -> list[ArtefactRow]:
        """What a run made (None: all there are), oldest first."""
        query = select(ArtefactRow).order_by(ArtefactRow.created_at, ArtefactRow.id)
        if run_id is not None:
            query = query.where(ArtefactRow.run_id == run_id)
        if kind is not None:
            query = query.where(ArtefactRow.kind == kind)
        with self._read() as session:
            return list(session.scalars(query))

    def find_artefacts(self, uri: str) -> list[ArtefactRow]:
        """Of this address, oldest first."""
        with self._read() as session:
            query = select(ArtefactRow).where(ArtefactRow.uri == uri).order_by(ArtefactRow.created_at, ArtefactRow.id)
            return list(session.scalars(query))

    def parents(self, artefact_id: str) -> list[ArtefactRow]:
        """What an artefact was made from, one step back."""
        return self._neighbours(LineageRow.child_id == artefact_id, LineageRow.parent_id)

    def children(self, artefact_id: str) -> list[ArtefactRow]:
        """What was made from an artefact, one step on."""
        return self._neighbours(LineageRow.parent_id == artefact_id, LineageRow.child_id)

    def ancestors(self, artefact_id: str) -> list[ArtefactRow]:
        """Everything an artefact was made from, however far back; nearest first."""
        found: dict[str, ArtefactRow] = {}
        wave = [artefact_id]
        while wave:
            rows = self._neighbours(LineageRow.child_id.in_(wave), LineageRow.parent_id)
            wave = [row.id for row in rows if row.id not in found and row.id != artefact_id]
            found |= {row.id: row for row in rows if row.id in wave}
        return list(found.values())

    def _neighbours(self, condition: Any, column: Any) -> list[ArtefactRow]:
        query = select(ArtefactRow).where(ArtefactRow.id.in_(select(column).where(condition)))
        with self._read() as session:
            return list(session.scalars(query.order_by(ArtefactRow.created_at, ArtefactRow.id)))
