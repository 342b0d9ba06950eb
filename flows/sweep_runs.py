"""Sweeps by name: a new one, a resumed one, or a refusal that says why."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from flows.config import changed_fields
from flows.preflight import preflight
from flows.runs import plain_name
from flows.sweep_config import SweepConfig
from flows.sweep_outcome import latest, record_attempt
from flows.sweep_space import Plan, field_path
from infra.reaper import owner_alive
from infra.registry import Owner, Registry
from infra.registry_records import SweepRow, TrialRow
from infra.registry_sweeps import SweepExists
from trainers.errors import ConfigError

# These rule how a sweep is attended to, not what its trials are: they may change when it is resumed.
_ATTENDANCE = ("parallel", "retry", "limits")
_LOOKED_AT = ("model", "dataset", "eval", "reward_funcs", "tools", "environment_factory", "servers")


class SweepRefused(ConfigError):
    """A sweep of this name cannot be started or resumed now."""


def named(registry: Registry, config: SweepConfig, flow_run_id: str | None, fallback: str, due: datetime | None) -> SweepConfig:
    """`config` with a name: that of the sweep `flow_run_id` belongs to (a flow run that is retried is due on another day); else
    its own, `{date}` filled in; else `fallback`."""
    known = next((row for row in registry.list_sweeps() if flow_run_id and row.prefect_flow_run_id == flow_run_id), None)
    if known is not None:
        name = known.name
    elif config.name is not None:
        name = config.name.replace("{date}", f"{due.astimezone() if due else datetime.now():%Y-%m-%d}")
    else:
        name = plain_name(fallback)
    return config.model_copy(update={"name": name})


def check_startable(registry: Registry, config: SweepConfig) -> SweepRow | None:
    """The sweep that `config.name` would resume, None for a new one. `config` is inlined (`flows.sweep_space`).

    Raises:
        SweepRefused: it is running or finished, or its config differs; or runs have the names of its trials.
    """
    row = registry.find_sweep(str(config.name))
    if row is None:
        ours = re.compile(re.escape(str(config.name)) + r"-t\d+\Z")
        if taken := [run.name for run in registry.list_runs() if ours.match(run.name)]:
            raise SweepRefused(f"a run is named {taken[0]!r} already, as a trial of this sweep would be: choose another name")
        return None
    if row.status == "RUNNING" and row.owner is not None and owner_alive(row.owner):
        raise SweepRefused(f"sweep {row.name!r} is running (process {row.owner.pid} on {row.owner.host}): choose another name")
    differing = changed_fields(_compared(row.config), _compared(stored(config)))
    if differing:
        raise SweepRefused(
            f"sweep {row.name!r} exists with another config; these fields differ: {', '.join(differing)}. "
            "Give the same values to resume it, or choose another name"
        )
    if row.status == "FINISHED" and all(trial.status != "RUNNING" for trial in latest(registry.list_trials(row.id))):
        raise SweepRefused(f"sweep {row.name!r} is finished: choose another name, or try failed trials again by --failed")
    return row


def open_sweep(registry: Registry, config: SweepConfig, flow_run_id: str | None) -> tuple[SweepRow, bool]:
    """The registry's row of this sweep, RUNNING and owned by this process, and whether it is resumed.

    Raises:
        SweepRefused: see `check_startable`; or another process was faster.
    """
    known = check_startable(registry, config)
    try:
        row = known or registry.create_sweep(str(config.name), stored(config))
    except SweepExists as error:
        raise SweepRefused(str(error)) from error
    if not registry.claim_sweep(row.id, Owner.current(), owner_alive):
        raise SweepRefused(f"sweep {row.name!r} was taken up by another process just now")
    row = registry.update_sweep(row.id, status="RUNNING", cause=None, prefect_flow_run_id=flow_run_id, config=stored(config))
    return row, known is not None


def reopen_failed(registry: Registry, row: SweepRow) -> list[TrialRow]:
    """A further attempt for every failed trial; what is to be started is then the sweep's work."""
    failed = [trial for trial in latest(registry.list_trials(row.id)) if trial.status == "FAILED"]
    return [record_attempt(registry, row, one.number, one.attempt + 1, one.params, one.run_id) for one in failed]


def preflight_trials(plan: Plan) -> None:
    """What can be seen to be wrong with the trials' models, data and rewards on this machine.

    Raises:
        ConfigError: with one line per problem.
    """
    first = plan.config.first_values
    preflight(plan.trial_config(0, first))
    for name, dimension in plan.config.space.items():
        if field_path(name)[0] in _LOOKED_AT:
            for value in dimension.known()[1:]:
                preflight(plan.trial_config(0, {**first, name: value}))


def stored(config: SweepConfig) -> dict[str, Any]:
    """The config as the registry and Prefect keep it: every value, references unresolved."""
    return config.model_dump(mode="json")


def config_of(row: SweepRow) -> SweepConfig:
    """The config a sweep was started with."""
    return SweepConfig.model_validate(row.config)


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _ATTENDANCE}
