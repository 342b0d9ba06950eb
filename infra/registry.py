"""The registry: what runs, attempts, leases, servers, checkpoints, artefacts, sweeps and costs there are.

    flow process ──┐
    trainer rank 0 ├──▶ Registry(url) ──▶ registry.db (WAL) or Postgres      every method is one short transaction
    reaper, CLI  ──┘

Invariants:
- a write transaction takes SQLite's write lock when it begins (BEGIN IMMEDIATE), so read-then-write never deadlocks and
  never works on stale rows; other databases get row locks or, for leases, a unique constraint;
- (kind, host, resource) of a lease is unique: of two processes that want it, one gets a row and the other gets None;
- tables are brought to the code's version when a registry is opened (`infra.migrations`);
- a `Registry` may be used from several threads; after a fork make a new one.

Child processes get the address by LOOPWRIGHT_REGISTRY_URL and never by a file, because it may hold a password.
"""

from __future__ import annotations

from pathlib import Path

from infra.migrations import bring_to_head
from infra.registry_attempts import Attempts
from infra.registry_core import URL_VARIABLE, AlreadyThere, NotFound, RunExists, RunNotFound, default_url
from infra.registry_costs import Costs
from infra.registry_engine import shown_url
from infra.registry_leases import Leases
from infra.registry_lineage import Lineage
from infra.registry_models import AttemptRow, CheckpointRow, LeaseRow, Owner, RunRow, ServerRow
from infra.registry_records import ArtefactRow, CostRow, SweepRow, TrialRow
from infra.registry_runs import Runs, config_hash
from infra.registry_servers import ServersAndCheckpoints
from infra.registry_sweeps import SweepExists, SweepNotFound, Sweeps

__all__ = [
    "URL_VARIABLE",
    "AlreadyThere",
    "ArtefactRow",
    "AttemptRow",
    "CheckpointRow",
    "CostRow",
    "LeaseRow",
    "NotFound",
    "Owner",
    "Registry",
    "RunExists",
    "RunNotFound",
    "RunRow",
    "ServerRow",
    "SweepExists",
    "SweepNotFound",
    "SweepRow",
    "TrialRow",
    "config_hash",
    "default_url",
    "shown_url",
]


class Registry(Runs, Attempts, Leases, ServersAndCheckpoints, Lineage, Sweeps, Costs):
    """See the module's docstring. `url=None`: the default database (`default_url`); a plain path is taken as an SQLite file.

    Errors of the database itself are SQLAlchemy's (`sqlalchemy.exc.SQLAlchemyError`).
    """

    def __init__(self, url: str | Path | None = None) -> None:
        super().__init__(url)
        bring_to_head(self._engine)
