"""Leases: who may use which resource of which host. (kind, host, resource) is unique, so of two that want it one gets it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError

from infra.registry_core import RegistryCore, RunNotFound
from infra.registry_engine import shown_url
from infra.registry_models import LeaseRow, Owner, RunRow, new_id


class Leases(RegistryCore):
    def insert_lease(self, kind: str, resource: str, owner: Owner, ttl_s: float, run_id: str | None = None) -> LeaseRow | None:
        """Lease one resource; None when somebody holds it (expired or not: the reaper frees, this does not)."""
        rows = self.insert_leases(kind, [resource], 1, owner, ttl_s, run_id)
        return rows[0] if rows else None

    def insert_leases(
        self,
        kind: str,
        candidates: Sequence[str],
        count: int,
        owner: Owner,
        ttl_s: float,
        run_id: str | None = None,
    ) -> list[LeaseRow] | None:
        """Lease the first `count` free ones of `candidates` on the owner's host, all or none (None)."""
        for _ in range(1 + len(candidates)):
            try:
                with self._write() as session:
                    query = select(LeaseRow.resource).where(LeaseRow.kind == kind, LeaseRow.host == owner.host)
                    taken = set(session.scalars(query))
                    free = [resource for resource in candidates if resource not in taken][:count]
                    if len(free) < count:
                        return None
                    rows = [
                        LeaseRow(
                            id=new_id(),
                            kind=kind,
                            host=owner.host,
                            resource=resource,
                            run_id=run_id,
                            expires_at=time.time() + ttl_s,
                            owner=owner,
                        )
                        for resource in free
                    ]
                    session.add_all(rows)
                return rows
            except IntegrityError:
                # Another process committed one of them in between (never on SQLite, where the lock is taken first).
                with self._read() as session:
                    if run_id is not None and session.get(RunRow, run_id) is None:
                        raise RunNotFound(f"no run has the id {run_id!r} in {shown_url(self.url)}") from None
        return None  # others took one of them each time we looked

    def renew(self, lease_id: str, ttl_s: float) -> bool:
        """Extend a lease; False: it is gone (reaped or deleted), stop using the resource."""
        with self._write() as session:
            result = session.execute(update(LeaseRow).where(LeaseRow.id == lease_id).values(expires_at=time.time() + ttl_s))
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
