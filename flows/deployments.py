"""What Prefect is told: the work pool with its limits, a deployment of every flow and preset, the automations.

    wanted (from the code, options) ──┐
                                      ├─ compare ─▶ only what differs is written ─▶ one `Change` each
    what the server has ──────────────┘

Invariants: doing it again changes nothing. What people set in Prefect's pages and the code does not rule stays as it is: limits
(unless asked for), schedules, further job variables, the parameters of deployments without a preset, switched-off automations.

`python -m flows.deployments` with `PREFECT_API_URL` set does it with all defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from flows.automations import HEARTBEAT_S, SILENCE_S, Notification, apply_automations
from flows.presets import ENTRYPOINTS, PRESETS
from flows.services import POOL
from flows.work_pools import MAINTENANCE_QUEUE, QUEUE, Change, apply_pool
from trainers.errors import ConfigError

LOCAL = "local"  # the deployment of a flow whose form is empty but for defaults
SCHEDULE_SLUG = "loopwright"
TAG = "loopwright"


@dataclass(frozen=True)
class Schedule:
    """When a deployment runs by itself; with its own copy of the config, so that later edits of the form do not change it."""

    cron: str
    timezone: str | None = None

    def __post_init__(self) -> None:
        self.as_prefect()

    def as_prefect(self) -> CronSchedule:
        """Raises ConfigError: the schedule or the time zone is none."""
        try:
            return CronSchedule(cron=self.cron, timezone=self.timezone or "UTC")
        except ValidationError as error:
            option = "--timezone" if "timezone" in error.errors()[0]["loc"] else "--schedule"
            raise ConfigError(f"{option}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


@dataclass(frozen=True)
class Target:
    """A deployment as it should be. `parameters` None: whatever is set in Prefect."""

    flow: str
    name: str = LOCAL
    summary: str = ""
    parameters: Mapping[str, Any] | None = None
    schedule: Schedule | None = None
    concurrency: int | None = None

    @property
    def queue(self) -> str:
        return MAINTENANCE_QUEUE if self.flow == "reap" else QUEUE


@dataclass(frozen=True)
class Plan:
    """All of it. `pool_limit` None: as it is, for a new pool by the machine."""

    targets: Sequence[Target]
    pool: str = POOL
    pool_limit: int | None = None
    notification: Notification = field(default_factory=Notification)
    silence_s: float = SILENCE_S


@cache
def form_of(kind: str) -> dict[str, Any]:
    """The JSON schema of a flow's parameters."""
    return parameter_schema(load_flow(kind)).model_dump(exclude_unset=True)


def load_flow(kind: str) -> Flow[..., Any]:
    module, _, name = ENTRYPOINTS[kind].rpartition(".")
    return getattr(import_module(module), name)


def standard_targets(kinds: Sequence[str] = ()) -> list[Target]:
    """The deployments every server has: one per flow, one per preset. `kinds`: of these flows only."""
    targets = [Target(kind) for kind in ENTRYPOINTS]
    targets += [
        Target(preset.kind, preset.name, preset.summary, {"config": dict(preset.fields)}) for preset in PRESETS.values()
    ]
    return [target for target in targets if not kinds or target.flow in kinds]


def deploy(plan: Plan | None = None) -> list[Change]:
    """Make the server agree with `plan` (default: everything there is); what was done, item by item.

    Raises:
        ConfigError: the server refused a deployment; the message says why.
    """
    plan = plan or Plan(standard_targets())
    with get_client(sync_client=True) as client:
        changes = [apply_pool(client, plan.pool, plan.pool_limit)]
        for target in plan.targets:
            changes.append(_apply_deployment(client, target, plan.pool))
            changes += _apply_schedule(client, target)
        changes += _refresh_others(client, {(load_flow(target.flow).name, target.name) for target in plan.targets})
        reaper = _find(client, load_flow("reap").name, LOCAL)
        flows = [load_flow(kind).name for kind in ENTRYPOINTS if kind != "reap"]
        if reaper is not None:
            applied = apply_automations(client, flows, reaper.id, plan.notification, plan.silence_s)
            changes += [Change(f"automation {name}", done) for name, done in applied]
    return changes


# --- deployments


def wanted_fields(target: Target, pool: str) -> dict[str, Any]:
    """The fields of a deployment that the code rules."""
    flow = load_flow(target.flow)
    fields: dict[str, Any] = {
        "work_pool_name": pool,
        "work_queue_name": target.queue,
        "entrypoint": ENTRYPOINTS[target.flow],
        "description": target.summary or (flow.description or "").partition("\n\n")[0],
        "enforce_parameter_schema": True,
        "parameter_openapi_schema": form_of(target.flow),
        "job_variables": {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}},
        "tags": [TAG],
    }
    if target.parameters is not None:
        fields["parameters"] = dict(target.parameters)
    if target.concurrency is not None:
        fields["concurrency_limit"] = target.concurrency
    return fields


def _apply_deployment(client: SyncPrefectClient, target: Target, pool: str) -> Change:
    flow, wanted = load_flow(target.flow), wanted_fields(target, pool)
    what = f"deployment {flow.name}/{target.name}"
    existing = _find(client, flow.name, target.name)
    try:
        if existing is None:
            client.create_deployment(client.create_flow_from_name(flow.name), target.name, **wanted)
            return Change(what, "created")
        changed = _differences(existing, wanted)
        if not changed:
            return Change(what, "unchanged")
        client.update_deployment(existing.id, DeploymentUpdate(**changed))
    except PrefectHTTPStatusError as error:
        raise ConfigError(f"{what}: Prefect refused it: {_reason(error)}") from error
    return Change(what, "updated", ", ".join(changed))


def _differences(existing: DeploymentResponse, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted fields whose value is another one now, ready to be written; job variables and tags of others are kept."""
    have = existing.model_dump(mode="json")
    have["concurrency_limit"] = existing.global_concurrency_limit.limit if existing.global_concurrency_limit else None
    variables = have["job_variables"] or {}
    merged = {
        **wanted,
        "job_variables": {**variables, "env": {**(variables.get("env") or {}), **wanted["job_variables"]["env"]}},
        "tags": list(dict.fromkeys([*have["tags"], *wanted["tags"]])),
    }
    return {name: value for name, value in merged.items() if have.get(name) != value}


def _find(client: SyncPrefectClient, flow: str, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(f"{flow}/{name}")
    except ObjectNotFound:
        return None


def _refresh_others(client: SyncPrefectClient, done: set[tuple[str, str]]) -> Iterator[Change]:
    """Deployments of our flows that people added (`--name nightly`) get the form of the installed code."""
    for kind, entrypoint in ENTRYPOINTS.items():
        flow = load_flow(kind)
        for found in client.read_deployments(flow_filter=FlowFilter(name=FlowFilterName(any_=[flow.name]))):
            stale = found.parameter_openapi_schema != form_of(kind) and found.entrypoint == entrypoint
            if not stale or (flow.name, found.name) in done:
                continue
            what = f"deployment {flow.name}/{found.name}"
            try:
                client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=form_of(kind)))
                yield Change(what, "updated", "parameter_openapi_schema")
            except PrefectHTTPStatusError as error:
                yield Change(what, "STALE", f"its parameters do not fit the installed version: {_reason(error)}")


def _reason(error: PrefectHTTPStatusError) -> str:
    try:
        return str(error.response.json().get("detail") or error)
    except ValueError:
        return str(error)


# --- schedules


def _apply_schedule(client: SyncPrefectClient, target: Target) -> Iterator[Change]:
    """The deployment's one schedule of ours; those that people added beside it stay."""
    if target.schedule is None:
        return
    flow = load_flow(target.flow).name
    deployment = _find(client, flow, target.name)
    assert deployment is not None, target
    cron = target.schedule.as_prefect()
    parameters = dict(target.parameters or {})
    what = f"schedule of {flow}/{target.name}"
    detail = f"{cron.cron} ({cron.timezone})"
    ours = next((one for one in deployment.schedules if one.slug == SCHEDULE_SLUG), None)
    if ours is None:
        new = DeploymentScheduleCreate(schedule=cron, parameters=parameters, slug=SCHEDULE_SLUG)
        client.create_deployment_schedules(deployment.id, [new])
        yield Change(what, "created", detail)
    elif (ours.schedule.model_dump(), ours.parameters) == (cron.model_dump(), parameters):
        yield Change(what, "unchanged", detail)
    else:
        client.update_deployment_schedule(deployment.id, ours.id, schedule=cron, parameters=parameters)
        yield Change(what, "updated", detail)


if __name__ == "__main__":
    done = deploy(Plan(standard_targets(), notification=Notification.from_environment()))
    print("\n".join(": ".join(filter(None, change)) for change in done))
