"""`loopwright deploy` and `loopwright config presets`; and the `--preset` that `run` and `config show` take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.presets import ENTRYPOINTS, PRESETS, find_preset
from flows.text_table import print_table
from trainers.errors import ConfigError

if TYPE_CHECKING:
    from flows.deployments import Plan, Target

PRESET = click.option("--preset", metavar="NAME", help="Start from this preset; CONFIG and FIELD=VALUE go over it.")


def split_settings(settings: tuple[str, ...], preset: str | None) -> tuple[Path | None, tuple[str, ...]]:
    """`[CONFIG] [FIELD=VALUE]…` as config file, if there is one, and overrides."""
    if not settings and preset is None:
        raise click.UsageError("name a CONFIG file, or a preset by --preset (`loopwright config presets` lists them)")
    if settings and ("=" not in settings[0] or Path(settings[0]).is_file()):
        return Path(settings[0]), settings[1:]
    return None, settings


@click.command()
@click.argument("name", required=False)
def presets(name: str | None) -> None:
    """List the presets, or print preset NAME as a config file to start from."""
    if name is None:
        rows = [(preset.name, preset.kind, preset.summary) for preset in PRESETS.values()]
        print_table([("PRESET", "FLOW", "FOR"), *rows])
        return
    import yaml

    preset = find_preset(name)
    click.echo(f"# {preset.summary}\n# Add what is yours: model (unless it is here), dataset.path.\n")
    click.echo(yaml.safe_dump(dict(preset.fields), sort_keys=False, allow_unicode=True), nl=False)


@click.command()
@click.argument("flow", type=click.Choice([*ENTRYPOINTS]), required=False)
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--pool", help="Work pool of the deployments, made if need be.  [default: loopwright]")
@click.option("--pool-limit", type=click.IntRange(1), help="Runs at a time in the pool. Default: as it is; new: by the GPUs.")
@click.option("--concurrency", type=click.IntRange(1), help="Runs at a time of the named deployment. Default: as it is.")
@click.option("--preset", metavar="NAME", help="The deployment's form opens with this preset's values.")
@click.option("--config", "path", type=click.Path(path_type=Path), help="… with this file's values, over the preset's.")
@click.option("--schedule", "cron", metavar="CRON", help='Run it by itself, as in "0 2 * * *": every night at two.')
@click.option("--timezone", metavar="TZ", help="Of the schedule, as in Europe/Berlin.  [default: UTC]")
@click.option("--name", help="Name of the deployment.  [default: that of the config file]")
@click.option("--no-notify", is_flag=True, help="Failed runs are no longer told to LOOPWRIGHT_NOTIFY_URL.")
def deploy(flow: str | None, overrides: tuple[str, ...], pool: str | None, **options: Any) -> None:
    """Tell Prefect about work pool, flows, presets, schedules and automations; prints what changed.

    Without FLOW: everything there is. With a config (--preset, --config, FIELD=VALUE) and --name: one more deployment of FLOW,
    whose form opens with these values and which a --schedule runs with them. Doing it again changes nothing. With
    LOOPWRIGHT_NOTIFY_URL set, failed and crashed runs are told to that address from now on.
    """
    from flows import prefect_api
    from flows.connections import running

    if flow is not None and "=" in flow:
        raise click.UsageError(f"FIELD=VALUE comes after FLOW: `loopwright deploy grpo {flow}`")
    if not os.environ.get("PREFECT_API_URL") and running() is None:
        raise ConfigError("there is no Prefect server to tell: start one by `loopwright up`, or name one in PREFECT_API_URL")
    with prefect_api.api():
        from flows.deployments import deploy as apply

        changes = apply(_plan(flow, overrides, pool, **options))
    print_table([("WHAT", "DONE", ""), *changes])
    changed = sum(change.done != "unchanged" for change in changes)
    click.echo(f"\n{changed} of {len(changes)} changed" if changed else "\nnothing changed")


def _plan(flow: str | None, overrides: tuple[str, ...], pool: str | None, **options: Any) -> Plan:
    from flows.automations import Notification
    from flows.deployments import Plan, standard_targets
    from flows.services import POOL

    wanted = Notification(remove=True) if options["no_notify"] else Notification.from_environment()
    asked = [f"--{name.replace('path', 'config').replace('cron', 'schedule')}" for name in _OF_ONE if options[name] is not None]
    if flow is None and options["preset"] is not None:
        flow = find_preset(options["preset"]).kind
    if flow is None and asked:
        raise click.UsageError(f"{asked[0]} is for the deployment of one FLOW: name it (grpo, sft, …)")
    if asked or overrides:
        targets = [_target(str(flow), overrides, **{name: options[name] for name in _OF_ONE})]
    else:
        targets = standard_targets([flow] if flow else [])
    return Plan(targets, pool or POOL, options["pool_limit"], wanted)


_OF_ONE = ("preset", "path", "cron", "timezone", "name", "concurrency")


def _target(
    flow: str,
    overrides: tuple[str, ...],
    preset: str | None,
    path: Path | None,
    cron: str | None,
    timezone: str | None,
    name: str | None,
    concurrency: int | None,
) -> Target:
    """The one deployment that is asked for."""
    from flows.deployments import LOCAL, Schedule, Target, standard_targets

    if timezone is not None and cron is None:
        raise click.UsageError("--timezone is the schedule's: give --schedule too")
    configured = path is not None or bool(overrides)
    if not configured and (name or preset or LOCAL) in {LOCAL, preset} and (cron is None or flow == "reap"):
        (target,) = (one for one in standard_targets([flow]) if one.name == (preset or LOCAL))
    else:
        name = name or (path.stem if path is not None else None)
        if name is None:
            raise click.UsageError("--name: what shall this deployment of your own be called?")
        if name == LOCAL or name in PRESETS:
            raise ConfigError(f"the name {name!r} is that of a deployment every server has: choose another --name")
        parameters = _parameters(flow, path, overrides, preset, whole=configured or cron is not None)
        target = Target(flow, name, f"Deployed from {path.name if path else f'preset {preset}'}.", parameters)
    if cron is not None:
        _repeatable(flow, target.parameters or {})
    schedule = Schedule(cron, timezone) if cron is not None else None
    return replace(target, schedule=schedule, concurrency=concurrency)


def _parameters(flow: str, path: Path | None, overrides: tuple[str, ...], preset: str | None, whole: bool) -> Mapping[str, Any]:
    """The flow's parameters: a validated config, its paths absolute, without what is default; or a preset alone as it is."""
    from flows.config import RUN_CONFIGS, absolute_paths
    from flows.config_file import load_config

    if flow == "sweep" and path is not None and preset is None:
        from flows.sweep_file import load_sweep
        from flows.sweep_space import inlined

        sweep = inlined(load_sweep(path, overrides), with_environment=True)
        return {"config": sweep.model_dump(mode="json", exclude_unset=True)}
    if flow not in RUN_CONFIGS:
        takes = "--config FILE" if flow == "sweep" else "no config here: its form is filled in by hand"
        raise ConfigError(f"the flow {flow!r} takes {takes}")
    if not whole and preset is not None:
        return {"config": dict(find_preset(preset, flow).fields)}
    config = absolute_paths(load_config(flow, path, overrides, preset=preset).config)
    return {"config": config.model_dump(mode="json", exclude_unset=True)}


def _repeatable(flow: str, parameters: Mapping[str, Any]) -> None:
    """A name stands for one run or sweep, which ends: the second night's would be refused."""
    name = parameters.get("config", {}).get("name")
    if name is not None and not (flow == "sweep" and "{date}" in name):
        remedy = "write {date} into `name`, or leave it out" if flow == "sweep" else "leave `name` out"
        raise ConfigError(
            f"a schedule starts a new {'sweep' if flow == 'sweep' else 'run'} each time, so name={name!r}: {remedy}"
        )
