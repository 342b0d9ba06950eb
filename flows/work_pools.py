"""The work pool: how many runs at a time, with a slot beside them that only the reaper can take.

    pool (limit N + 1)
     ├─ queue default      limit N     runs
     └─ queue maintenance  limit 1     the reaper: with every slot held by runs whose processes are gone, only it can free them

Prefect counts Pending and Running flow runs. A run whose GPUs are not free fails instead of waiting, so N is what the machine
holds.
"""

from __future__ import annotations

from typing import NamedTuple

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from infra.gpus import visible_gpus

QUEUE, MAINTENANCE_QUEUE = "default", "maintenance"
GPUS_PER_RUN = 2  # of a config that does not say: one server, one rank
RUNS_WITHOUT_GPUS = 2


class Change(NamedTuple):
    """One line of what `deploy` did: `created`, `updated` (and what), `unchanged` or `stale` (and why)."""

    what: str
    done: str
    detail: str = ""


def default_limit() -> int:
    """Runs at a time that a machine like this one can hold: more would fail for want of GPUs, or crawl on its CPU."""
    gpus = len(visible_gpus())
    return max(1, gpus // GPUS_PER_RUN) if gpus else RUNS_WITHOUT_GPUS


def apply_pool(client: SyncPrefectClient, name: str, limit: int | None) -> Change:
    """Create the pool `name`, or set its limit. None: as it is, `default_limit()` for a new pool."""
    what = f"work pool {name}"
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        limit = limit or default_limit()
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit + 1)
        )
        _limit_queue(client, name, QUEUE, limit)
        done = Change(what, "created", f"{limit} runs at a time")
    else:
        done = Change(what, "unchanged")
        if limit is not None and (pool.concurrency_limit, _queue_limit(client, name, QUEUE)) != (limit + 1, limit):
            client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit + 1))
            _limit_queue(client, name, QUEUE, limit)
            done = Change(what, "updated", f"{limit} runs at a time")
    if _queue_limit(client, name, MAINTENANCE_QUEUE) is None:
        _limit_queue(client, name, MAINTENANCE_QUEUE, 1)
    return done


def _queue_limit(client: SyncPrefectClient, pool: str, queue: str) -> int | None:
    try:
        return client.read_work_queue_by_name(queue, work_pool_name=pool).concurrency_limit
    except ObjectNotFound:
        return None


def _limit_queue(client: SyncPrefectClient, pool: str, queue: str, limit: int) -> None:
    try:
        found = client.read_work_queue_by_name(queue, work_pool_name=pool)
    except ObjectNotFound:
        found = client.create_work_queue(queue, work_pool_name=pool)
    client.update_work_queue(found.id, concurrency_limit=limit)
