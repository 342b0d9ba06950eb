"""`loopwright sweep run|show|resume`. Imports what a command needs only when it runs, as `flows.cli` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flows.sweep_config import SweepConfig
    from infra.registry import Registry
    from infra.registry_records import SweepRow


@click.group()
def sweep() -> None:
    """Try a space of configs; the trials are runs."""


@sweep.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...")
def run_sweep(file: Path, overrides: tuple[str, ...]) -> None:
    """Run the sweep of FILE (YAML or JSON), and wait for it.

    FIELD=VALUE sets a field, dotted for nested ones: `trials=20 base.max_steps=50 space.learning_rate.high=1e-3`. The same
    name again goes on with a sweep that was stopped.
    """
    from flows.sweep_file import load_sweep
    from flows.sweep_space import inlined

    launch(inlined(load_sweep(file, overrides), with_environment=True))


@sweep.command()
@click.argument("name")
@click.option("--failed", is_flag=True, help="Try its failed trials again too.")
def resume(name: str, failed: bool) -> None:
    """Go on with the sweep NAME: finished trials are kept, those that were stopped go on from their last checkpoint."""
    from flows.sweep_runs import config_of, reopen_failed
    from infra.registry import Registry

    registry = Registry()
    row = _found(registry, name)
    if failed:
        click.echo(f"{len(reopen_failed(registry, row))} failed trial(s) are tried again")
    launch(config_of(row))


@sweep.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(name: str, as_json: bool) -> None:
    """The sweep NAME: its state, the best trial, and every trial."""
    import json

    from flows.sweep_report import counted, summary
    from flows.sweep_runs import config_of
    from flows.text_table import print_table
    from infra.registry import Registry

    registry = Registry()
    row = _found(registry, name)
    found = summary(config_of(row), registry.list_trials(row.id), row.result.get("importance"))
    found |= {"status": row.status, "cause": row.cause, "mlflow_run": row.mlflow_run_id}
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    facts = [
        ("name", row.name),
        ("status", row.status),
        ("cause", row.cause),
        ("trials", f"{found['trials']}: {counted(found)}"),
    ]
    if best := found["best"]:
        facts += [("best", f"{best['run']}, {found['metric']} {best['value']:.6g}")]
    facts += [(f"importance {field}", f"{share:.3f}") for field, share in (found["importance"] or {}).items()]
    facts += [("MLflow run", row.mlflow_run_id), ("Prefect flow run", row.prefect_flow_run_id)]
    print_table([(label, str(value)) for label, value in facts if value is not None])
    if found["rows"]:
        click.echo()
        fields = list(found["rows"][0]["params"])
        print_table([("RUN", "STATUS", found["metric"], *fields), *(_line(trial, fields) for trial in found["rows"])])


def _found(registry: Registry, name: str) -> SweepRow:
    from trainers.errors import ConfigError

    row = registry.find_sweep(name)
    if row is None:
        known = ", ".join(row.name for row in registry.list_sweeps()[:5])
        hint = f"the newest are {known}" if known else "there is none yet; `loopwright sweep run FILE` starts one"
        raise ConfigError(f"no sweep is named {name!r}; {hint}")
    return row


def launch(config: SweepConfig) -> None:
    """Run the sweep's flow to its end.

    Raises:
        LoopwrightError: the sweep was refused or failed.
    """
    from flows.launch import run_flow
    from flows.runs import new_name
    from flows.sweep_runs import check_startable, named, preflight_trials
    from flows.sweep_space import checked
    from infra.registry import Registry

    registry = Registry()
    plan = checked(named(registry, config, None, new_name("sweep"), None))
    check_startable(registry, plan.config)
    preflight_trials(plan)  # again in the flow; here it saves the user the wait for Prefect

    def flow() -> object:
        from flows.sweep import sweep

        return sweep

    run_flow("sweep", flow, plan.config)


def _line(trial: dict, fields: list[str]) -> tuple[str, ...]:
    import json

    value = "" if trial["value"] is None else f"{trial['value']:.6g}"
    shown = (trial["params"].get(name) for name in fields)
    return (trial["run"], trial["status"], value, *(one if isinstance(one, str) else json.dumps(one) for one in shown))
