"""Costs of runs: GPU seconds, tokens, money. An attempt's value is set, not added to, so writing it again counts once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from sqlalchemy import select

from infra.registry_core import RegistryCore
from infra.registry_records import CostRow

UNITS = {"gpu_s": "s", "idle_gpu_s": "s", "tokens": "tokens", "usd": "usd"}


def unit_of(kind: str) -> str:
    """The unit of a kind such as `gpu_s/trainer`, by what stands before its `/`.

    Raises:
        ValueError: no such kind.
    """
    head = kind.partition("/")[0]
    if head not in UNITS:
        raise ValueError(f"{kind!r} is no kind of cost: it begins with {', '.join(UNITS)}")
    return UNITS[head]


class Costs(RegistryCore):
    def add_costs(self, run_id: str, attempt: int, values: Mapping[str, float]) -> None:
        """Set what an attempt has used so far, by kind, in one transaction. A value never goes down: an older one that is
        written late changes nothing."""
        with self._write() as session:
            self._locked_run(session, run_id)
            for kind, value in values.items():
                row = session.get(CostRow, (run_id, attempt, kind))
                if row is None:
                    session.add(CostRow(run_id=run_id, attempt=attempt, kind=kind, value=value, unit=unit_of(kind)))
                elif value > row.value:
                    row.value, row.updated_at = value, time.time()

    def costs(self, run_id: str) -> dict[str, float]:
        """By kind, over all attempts."""
        total: Counter[str] = Counter()
        for row in self.list_costs(run_id):
            total[row.kind] += row.value  # type: ignore[assignment]
        return dict(sorted(total.items()))

    def list_costs(self, run_id: str) -> list[CostRow]:
        """By attempt and kind."""
        query = select(CostRow).where(CostRow.run_id == run_id).order_by(CostRow.attempt, CostRow.kind)
        with self._read() as session:
            return list(session.scalars(query))
