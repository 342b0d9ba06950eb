"""Cleans up after owners that are gone, and only after those.

A lease of this machine whose owning process no longer exists, or that was not renewed in time, is reaped: every process that
carries its mark is killed, then the row is deleted and the resource is free. A run whose owner is gone becomes FAILED with
that as its cause, or KILLED if its flow was being stopped; unless somebody resumes it at the same moment: then it is theirs.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass, field

from infra.process import alive, kill_marked
from infra.registry import LeaseRow, Owner, Registry

logger = logging.getLogger(__name__)

UNFINISHED = ("PENDING", "RUNNING")


@dataclass
class ReapReport:
    """`leases`: "kind resource: why"; `killed`: pids; `runs`: name → FAILED or KILLED, of runs that were given that status."""

    leases: list[str] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not (self.leases or self.runs):
            return "nothing to reap"
        lines = [f"lease {line}" for line in self.leases] + [f"run {name}: {status}" for name, status in self.runs.items()]
        return "\n".join([*lines, f"{len(self.killed)} processes killed"])


def owner_alive(owner: Owner) -> bool:
    """Whether the owner still runs. One on another machine counts as alive: only its own machine can tell."""
    return owner.host != socket.gethostname() or alive(owner.pid, owner.start_time)


def reap(registry: Registry) -> ReapReport:
    """One pass over this machine's leases and the unfinished runs."""
    report = ReapReport()
    dead = [(lease, why) for lease in registry.list_leases(host=socket.gethostname()) if (why := _why_dead(lease)) is not None]
    # Kill all before any row is freed: a server's processes carry its port's mark and hold its GPUs.
    freed = [(lease, why) for lease, why in dead if _kill(lease, report)]
    for lease, why in freed:
        _free(registry, lease, why, report)
    for run in registry.list_runs(light=True):
        if run.status in UNFINISHED and run.owner is not None and not owner_alive(run.owner):
            _end_run(registry, run.id, run.owner, report)
    return report


def _why_dead(lease: LeaseRow) -> str | None:
    if lease.owner is None:
        return "it has no owner"
    if not owner_alive(lease.owner):
        return f"its owner, process {lease.owner.pid}, is gone"
    if lease.expires_at <= time.time():
        return f"its owner, process {lease.owner.pid} on {lease.owner.host}, did not renew it in time"
    return None


def _kill(lease: LeaseRow, report: ReapReport) -> bool:
    try:
        report.killed += kill_marked(lease.id)
    except TimeoutError as error:
        # The row stays: a process that cannot be killed still uses the resource.
        logger.error("lease %s %s cannot be freed: %s", lease.kind, lease.resource, error)
        return False
    return True


def _free(registry: Registry, lease: LeaseRow, why: str, report: ReapReport) -> None:
    for server in registry.list_servers(running=True):
        if server.lease_id == lease.id:
            registry.end_server(server.id, f"reaped: {why}")
    if registry.delete_lease(lease.id):
        report.leases.append(f"{lease.kind} {lease.resource}: {why}")


def _end_run(registry: Registry, run_id: str, dead: Owner, report: ReapReport) -> None:
    if not registry.claim_run(run_id, Owner.current(), owner_alive):
        return  # resumed in between
    run = registry.get_run(run_id)
    if run.status not in UNFINISHED:
        registry.update_run(run_id, owner=None)
        return
    attempts = registry.list_attempts(run_id)
    status, failure = "FAILED", "infrastructure"
    cause = f"the flow's process {dead.pid} on {dead.host} is gone: killed, or the machine was restarted"
    if attempts and attempts[-1].status == "KILLED":  # noted first by a flow that is told to stop
        status, failure, cause = "KILLED", None, attempts[-1].cause
    for attempt in attempts:
        if attempt.ended_at is None:
            registry.end_attempt(run_id, attempt.number, "FAILED", failure, cause)
    # The dead owner stays in the row: it tells a run that was lost from one that its flow has given up itself.
    registry.update_run(run_id, status=status, failure_class=failure, cause=cause, owner=dead)
    report.runs[run.name] = status
