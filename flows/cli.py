"""The `loopwright` command. Imports what a command needs only when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.reproduce_cli import reproduce
from flows.servers_cli import servers
from flows.text_table import print_table as _table

if TYPE_CHECKING:
    from flows.config_file import LoadedConfig
    from infra.registry import RunRow

KINDS = click.Choice(["grpo", "sft"])
STATUS = click.Choice(["pending", "running", "finished", "failed", "killed"], case_sensitive=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="loopwright")
def cli() -> None:
    """Post-training experiments on language models: start, watch, resume."""


@cli.command()
@click.argument("kind", type=KINDS)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...")
def run(kind: str, config: Path, overrides: tuple[str, ...]) -> None:
    """Run an experiment from CONFIG (YAML or JSON).

    FIELD=VALUE sets a field, dotted for nested ones: `num_generations=16 servers.student.max_model_len=512`. With
    `loopwright up` running, the run shows there; else Prefect's server is started for as long as the run takes.
    """
    from flows.config import absolute_paths
    from flows.launch import launch

    launch(absolute_paths(_load(kind, config, overrides).config))


@cli.command()
@click.argument("run")
def resume(run: str) -> None:
    """Go on with the failed or killed RUN (name or id) from its last whole checkpoint."""
    from flows.launch import launch
    from flows.runs import config_of
    from infra.registry import Registry

    launch(config_of(Registry().get_run(run)))


@cli.command()
def reap() -> None:
    """Stop processes and free leases whose owner is gone, and mark its runs as failed; touches nothing else."""
    from flows.reaping import reap_all

    click.echo(reap_all())


@cli.group()
def runs() -> None:
    """Look at runs in the registry."""


@runs.command("list")
@click.option("--status", type=STATUS, help="Only runs of this status.")
def list_runs(status: str | None) -> None:
    """All runs, newest first."""
    from infra.registry import Registry

    rows = Registry().list_runs(status.upper() if status else None)  # type: ignore[arg-type]
    _table([("NAME", "FLOW", "STATUS", "STEP", "CREATED", "CAUSE"), *(_run_line(row) for row in rows)])


@runs.command()
@click.argument("run")
def show(run: str) -> None:
    """One run: status, progress, attempts, checkpoints, servers."""
    from infra.registry import Registry

    registry = Registry()
    row = registry.get_run(run)
    facts = {
        "name": row.name, "id": row.id, "flow": row.flow, "status": row.status,
        "failure": row.failure_class, "cause": row.cause,
        "folder": row.output_dir, "MLflow run": row.mlflow_run_id, "Prefect flow run": row.prefect_flow_run_id,
    }  # fmt: skip
    facts |= {f"progress {name}": value for name, value in row.progress.items()}
    facts |= {f"stage {name}": value for name, value in row.stages.items()}
    _table([(name, str(value)) for name, value in facts.items() if value is not None])
    attempts = [
        (
            str(item.number),
            item.status,
            _text(item.resume_step),
            _time(item.started_at),
            _time(item.ended_at),
            _first(item.cause),
        )
        for item in registry.list_attempts(row.id)
    ]
    if attempts:
        click.echo()
        _table([("ATTEMPT", "STATUS", "FROM STEP", "STARTED", "ENDED", "CAUSE"), *attempts])
    checkpoints = [(str(item.step), _time(item.created_at), item.path) for item in registry.list_checkpoints(row.id)]
    if checkpoints:
        click.echo()
        _table([("CHECKPOINT", "WRITTEN", "FOLDER"), *checkpoints])
    servers = [(item.name, item.url, item.exit or "", _text(item.log_path)) for item in registry.list_servers(row.id)]
    if servers:
        click.echo()
        _table([("SERVER", "ADDRESS", "ENDED", "LOG"), *servers])


@cli.group()
def config() -> None:
    """Look at configs."""


@config.command("show")
@click.argument("kind", type=KINDS)
@click.argument("path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...")
def show_config(kind: str, path: Path, overrides: tuple[str, ...]) -> None:
    """Each field's value and where it came from. References to the environment are shown as written."""
    import json

    loaded = _load(kind, path, overrides)
    _table([(name, json.dumps(value, ensure_ascii=False), source) for name, value, source in loaded.rows()])


@cli.command()
def up() -> None:
    """Start Prefect, MLflow and a worker on this machine; they stay up until `loopwright down`."""
    from flows.services import start

    _table(start())


@cli.command()
def down() -> None:
    """Stop what `loopwright up` started."""
    from flows.services import stop

    click.echo("stopped" if stop() else "nothing was running")


@cli.command()
def status() -> None:
    """What `loopwright up` started, and the runs that are running."""
    from flows.services import describe
    from infra.registry import Registry

    _table(describe())
    running = Registry().list_runs("RUNNING")
    if running:
        click.echo()
        _table([("NAME", "FLOW", "STATUS", "STEP", "CREATED", "CAUSE"), *(_run_line(row) for row in running)])


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list of findings.")
@click.option("--python", help="Interpreter that has vLLM. Default: this one.")
@click.option("--deep", is_flag=True, help="Also start a vLLM server with a tiny model (a minute or two).")
def doctor(as_json: bool, python: str | None, deep: bool) -> None:
    """Check this machine: GPUs, vLLM, ports, storage, database, tracking, Prefect, packages. Exit code 1: a run would fail."""
    from flows.doctor import examine, print_findings

    findings = examine(python, deep)
    print_findings(findings, as_json)
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="MODEL [OPTION]...")
def serve(arguments: tuple[str, ...]) -> None:
    """Serve MODEL with vLLM in the foreground, set up as a run's student (`loopwright serve --help` for options)."""
    from infra.vllm import main as serve_main

    sys.exit(serve_main(["serve", *arguments]))


@cli.command()
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the task, the weights and all sampling."
)
def quickstart(seed: int) -> None:
    """A whole small experiment: make a task and a model, train by SFT, then by GRPO; ten minutes on two cores."""
    from flows.quickstart import run as run_quickstart

    run_quickstart(seed)


cli.add_command(servers)
cli.add_command(reproduce)


def main() -> None:
    """Entry point: what went wrong is lines on stderr, not a traceback. Exit code 2: the user's input; 1: the run failed."""
    try:
        cli()
    except Exception as error:
        from sqlite3 import DatabaseError

        from infra.errors import InfraError
        from infra.registry import RunExists, RunNotFound
        from trainers.errors import ConfigError, LoopwrightError

        if isinstance(error, DatabaseError):  # met when the registry is opened, before SQLAlchemy has it in hand
            from infra.registry import default_url

            error = InfraError(f"{default_url()} cannot be used: {error}")
        if not isinstance(error, LoopwrightError | InfraError | RunNotFound | RunExists):
            raise
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(2 if isinstance(error, ConfigError | RunNotFound) else 1)


def _load(kind: str, path: Path, overrides: tuple[str, ...]) -> LoadedConfig:
    from flows.config_file import load_config

    return load_config(kind, path, overrides)


def _run_line(row: RunRow) -> tuple[str, ...]:
    step = row.progress.get("step")
    shown = "" if step is None else f"{step}/{row.progress.get('max_steps') or '?'}"
    return row.name, row.flow, row.status, shown, _time(row.created_at), _first(row.cause)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _first(text: str | None) -> str:
    """The first line, which says the cause; what follows is the end of a log."""
    return text.splitlines()[0] if text else ""


def _time(seconds: float | None) -> str:
    from datetime import datetime

    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
