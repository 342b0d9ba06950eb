"""What Prefect's server does by itself about flow runs of ours.

    a flow run stops sending heartbeats ─┐ (SIGKILL together with its worker; its machine is gone)
    a flow run stays Pending             ┤ (the worker died while it started it)
                                         ├─▶ Crashed ─┬─▶ flow run `reap`: processes, leases, registry, MLflow
    the worker sees its process die ─────┘            │
    a flow run fails ─────────────────────────────────┴─▶ POST to the notification address, if there is one

Heartbeats come from Prefect's engine inside the flow's process, every `HEARTBEAT_S`. Ten of them must be missing: an outage
of Prefect's server, a suspended laptop or a machine at its limit is no death, and a run that is called Crashed by mistake
goes on and ends Completed. Only flow runs of our own flows are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentCreate, BlockDocumentUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from trainers.errors import ConfigError

NOTIFY_VARIABLE = "LOOPWRIGHT_NOTIFY_URL"
HEARTBEAT_S = 30
# Of a flow run that is then taken for dead; more than Prefect's own interval of 180 s, which a script may have.
SILENCE_S = 300.0
PENDING_S = 900.0  # of a flow run that never started
BLOCK, WEBHOOK = "loopwright-notify", "webhook"
NO_HEARTBEAT, STUCK, CRASHED, NOTIFY = (
    "loopwright: no heartbeat",
    "loopwright: stuck in Pending",
    "loopwright: crashed",
    "loopwright: notify",
)

_RUN = "prefect.flow-run."
_OVER = {_RUN + state for state in ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")}

# What the address gets. `state.message` of a failed run begins with the cause.
PAYLOAD = """{
  "flow": {{ flow.name | tojson }},
  "run": {{ flow_run.name | tojson }},
  "state": {{ flow_run.state.name | tojson }},
  "message": {{ (flow_run.state.message or "") | tojson }},
  "flow_run_id": {{ flow_run.id | string | tojson }},
  "url": {{ flow_run | ui_url | tojson }},
  "time": {{ event.occurred | string | tojson }}
}"""


@dataclass(frozen=True)
class Notification:
    """Where failures are told. `url` None: as it is on the server; `remove`: nowhere. The address may itself be a secret."""

    url: str | None = None
    remove: bool = False

    def __post_init__(self) -> None:
        if self.url is not None and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname):
            raise ConfigError(f"{NOTIFY_VARIABLE} is no web address: it starts with https:// or http://")

    def __repr__(self) -> str:
        return f"Notification(url={'(removed)' if self.url else None}, remove={self.remove})"

    @classmethod
    def from_environment(cls) -> Notification:
        return cls(os.environ.get(NOTIFY_VARIABLE) or None)


def apply_automations(
    client: SyncPrefectClient, flows: Sequence[str], reaper: UUID, notification: Notification, silence_s: float = SILENCE_S
) -> Iterator[tuple[str, str]]:
    """Create or update the automations for flow runs of `flows`; (name, created | updated | unchanged | removed) of each.

    One that was switched off stays off.
    """
    for automation in (*_deaths(flows, silence_s), _reap(flows, reaper)):
        yield automation.name, _apply(client, automation)
    if notification.remove:
        for found in client.read_automations_by_name(NOTIFY):
            client.delete_automation(found.id)
            yield NOTIFY, "removed"
        return
    if notification.url is not None:
        block, changed = _webhook(client, notification.url)
        done = _apply(client, _notify(flows, block))
        yield NOTIFY, "updated" if changed and done == "unchanged" else done


def _of(flows: Sequence[str]) -> ResourceSpecification:
    return ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": [*flows]})


def _trigger(
    flows: Sequence[str],
    posture: Literal[Posture.Reactive, Posture.Proactive],
    expect: set[str],
    after: set[str],
    within_s: float,
) -> EventTrigger:
    return EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": f"{_RUN}*"}),
        match_related=_of(flows),
        posture=posture,
        after=after,
        expect=expect,
        for_each={"prefect.resource.id"},
        threshold=1,
        within=timedelta(seconds=within_s),
    )


def _deaths(flows: Sequence[str], silence_s: float) -> Iterator[AutomationCore]:
    beat = f"{_RUN}heartbeat"
    yield AutomationCore(
        name=NO_HEARTBEAT,
        description=f"A flow run that has sent nothing for {silence_s:.0f} s is dead, and its worker with it.",
        trigger=_trigger(flows, Posture.Proactive, {beat, *_OVER}, {beat}, silence_s),
        actions=[_crash(f"no heartbeat for {silence_s:.0f} s: the flow's process and its worker, or their machine, are gone")],
    )
    pending = f"{_RUN}Pending"
    yield AutomationCore(
        name=STUCK,
        description=f"A flow run that stays Pending for {PENDING_S:.0f} s lost its worker; it holds a slot of the pool.",
        trigger=_trigger(flows, Posture.Proactive, {f"{_RUN}Running", f"{_RUN}Scheduled", *_OVER}, {pending}, PENDING_S),
        actions=[_crash(f"Pending for {PENDING_S:.0f} s: its worker went away while it started the flow")],
    )


def _crash(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message, force=False)


def _reap(flows: Sequence[str], deployment: UUID) -> AutomationCore:
    return AutomationCore(
        name=CRASHED,
        description="What a crashed flow run leaves is cleaned up: processes, leases, the run's state.",
        trigger=_trigger(flows, Posture.Reactive, {f"{_RUN}Crashed"}, set(), 0),
        actions=[RunDeployment(source="selected", deployment_id=deployment, parameters=None, job_variables=None)],
    )


def _notify(flows: Sequence[str], block: UUID) -> AutomationCore:
    return AutomationCore(
        name=NOTIFY,
        description=f"A flow run that failed or crashed is told to {NOTIFY_VARIABLE}.",
        trigger=_trigger(flows, Posture.Reactive, {f"{_RUN}Failed", f"{_RUN}Crashed", f"{_RUN}TimedOut"}, set(), 0),
        actions=[CallWebhook(block_document_id=block, payload=PAYLOAD)],
    )


def _apply(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return "created"
    existing = found[0]
    if _ruled(existing) == _ruled(wanted):
        return "unchanged"
    client.update_automation(existing.id, wanted.model_copy(update={"enabled": existing.enabled}))
    return "updated"


def _ruled(automation: AutomationCore) -> dict[str, Any]:
    """What the code rules of it, as plain data; sets in one order."""
    data = automation.model_dump(mode="json", include={"name", "description", "trigger", "actions"})
    for name in ("after", "expect", "for_each"):
        data["trigger"][name] = sorted(data["trigger"][name])
    return data


def _webhook(client: SyncPrefectClient, url: str) -> tuple[UUID, bool]:
    """The block that holds the address, encrypted by Prefect's server; and whether it is another address than before."""
    data = {"url": url, "headers": {"Content-Type": "application/json"}}
    try:
        found = client.read_block_document_by_name(BLOCK, WEBHOOK, include_secrets=True)
    except ObjectNotFound:
        kind = client.read_block_type_by_slug(WEBHOOK)
        schema = client.get_most_recent_block_schema_for_block_type(kind.id)
        assert schema is not None, "Prefect's server has no schema of its own webhook block"
        new = BlockDocumentCreate(name=BLOCK, data=data, block_schema_id=schema.id, block_type_id=kind.id)
        return client.create_block_document(new).id, True
    if {name: found.data.get(name) for name in data} == data:
        return found.id, False
    client.update_block_document(found.id, BlockDocumentUpdate(data=data))
    return found.id, True
