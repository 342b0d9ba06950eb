"""The `loopwright` command. Imports what a command needs only when it runs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from flows.checkpoints_cli import checkpoints
from flows.deploy_cli import PRESET, deploy, presets, split_settings
from flows.evaluate_cli import evaluate
from flows.export_cli import export
from flows.plan_memory_cli import plan_memory
from flows.recipe_cli import specialise_and_merge
from flows.reproduce_cli import reproduce
from flows.runs_cli import print_runs, runs
from flows.servers_cli import servers
from flows.sweep_cli import sweep
from flows.text_table import print_table as _table

if TYPE_CHECKING:
    from flows.config_file import LoadedConfig

KINDS = click.Choice(["grpo", "distillation", "sft"])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="loopwright")
@click.pass_context
def cli(context: click.Context) -> None:
    """Post-training experiments on language models: start, watch, resume."""
    from flows.connections import connect
    from infra.errors import InfraError

    try:
        connect()
    except InfraError:
        if context.invoked_subcommand != "doctor":  # which finds that, too, and says the rest
            raise


@cli.command()
@click.argument("kind", type=KINDS)
@click.argument("settings", nargs=-1, metavar="[CONFIG] [FIELD=VALUE]...")
@PRESET
def run(kind: str, settings: tuple[str, ...], preset: str | None) -> None:
    """Run an experiment from CONFIG (YAML or JSON), or from a preset (`loopwright config presets`), or from both.

    FIELD=VALUE sets a field, dotted for nested ones: `num_generations=16 servers.student.max_model_len=512`. With
    `loopwright up` running, the run shows there; else Prefect's server is started for as long as the run takes.
    """
    from flows.config import absolute_paths
    from flows.launch import launch

    launch(absolute_paths(_load(kind, settings, preset).config))


@cli.command()
@click.argument("run")
def resume(run: str) -> None:
    """Go on with the failed or killed RUN (name or id) from its last whole checkpoint."""
    from flows.launch import launch
    from flows.recipe_cli import launch as launch_recipe
    from flows.recipe_runs import FLOW, config_of_recipe
    from flows.runs import config_of
    from infra.registry import Registry

    row = Registry().get_run(run)
    if row.flow == FLOW:
        launch_recipe(config_of_recipe(row))
    else:
        launch(config_of(row))


@cli.command()
def reap() -> None:
    """Stop processes and free leases whose owner is gone, and mark its runs as failed; touches nothing else."""
    from flows.reaping import reap_all

    click.echo(reap_all())


@cli.group()
def config() -> None:
    """Look at configs."""


@config.command("show")
@click.argument("kind", type=KINDS)
@click.argument("settings", nargs=-1, metavar="[CONFIG] [FIELD=VALUE]...")
@PRESET
def show_config(kind: str, settings: tuple[str, ...], preset: str | None) -> None:
    """Each field's value and where it came from. References to the environment are shown as written."""
    import json

    loaded = _load(kind, settings, preset)
    _table([(name, json.dumps(value, ensure_ascii=False), source) for name, value, source in loaded.rows()])


@cli.command()
@click.option("--shared", is_flag=True, help="For other machines too: on one private address, behind keys.")
@click.option("--host", help="With --shared: the address. Default: this machine's private one.")
@click.option("--prefect-port", type=click.IntRange(0, 65535), help="Default: any free one; 4200 if shared.")
@click.option("--mlflow-port", type=click.IntRange(0, 65535), help="Default: any free one; 5000 if shared.")
@click.option("--show-keys", is_flag=True, help="Print what another machine sets to use shared services, keys included.")
def up(shared: bool, host: str | None, prefect_port: int | None, mlflow_port: int | None, show_keys: bool) -> None:
    """Start Prefect, MLflow and a worker on this machine; they stay up until `loopwright down`.

    A server that PREFECT_API_URL or MLFLOW_TRACKING_URI names is used instead of one started here.
    """
    from flows.services import start
    from flows.sharing import other_machines

    if shared or not show_keys:
        _table(start(shared, host, prefect_port, mlflow_port))
    if show_keys:
        click.echo("\n".join(other_machines()))


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
    running = Registry().list_runs("RUNNING", light=True)
    if running:
        click.echo()
        print_runs(running)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list of findings.")
@click.option("--python", help="Interpreter that has vLLM. Default: this one.")
@click.option("--storage", "uri", metavar="URI", help="Where checkpoints are to go. Default: LOOPWRIGHT_STORAGE__URI, if set.")
@click.option("--deep", is_flag=True, help="Also start a vLLM server with a tiny model (a minute or two).")
def doctor(as_json: bool, python: str | None, uri: str | None, deep: bool) -> None:
    """Check this machine: GPUs, vLLM, ports, storage, database, tracking, Prefect, packages. Exit code 1: a run would fail."""
    from flows.doctor import examine, print_findings

    findings = examine(python, deep, uri)
    print_findings(findings, as_json)
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


# Not interspersed: click would take out the `--` before vLLM's own arguments.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False}


@cli.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="MODEL [OPTION]... [-- VLLM_ARGUMENT...]")
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


cli.add_command(runs)
cli.add_command(checkpoints)
cli.add_command(servers)
cli.add_command(sweep)
cli.add_command(deploy)
config.add_command(presets)
cli.add_command(reproduce)
cli.add_command(evaluate)
cli.add_command(export)
cli.add_command(specialise_and_merge)
cli.add_command(plan_memory)


def main() -> None:
    """Entry point: what went wrong is lines on stderr, not a traceback. Exit code 2: the user's input; 1: the run failed."""
    try:
        cli()
    except Exception as error:
        from sqlite3 import DatabaseError

        from sqlalchemy.exc import DBAPIError

        from infra.errors import InfraError
        from infra.registry import AlreadyThere, NotFound
        from trainers.errors import ConfigError, LoopwrightError

        if isinstance(error, DatabaseError | DBAPIError):  # sqlite's own: met before SQLAlchemy has it in hand
            error = InfraError(_database_trouble(error))
        if not isinstance(error, LoopwrightError | InfraError | NotFound | AlreadyThere):
            raise
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(2 if isinstance(error, ConfigError | NotFound) else 1)


def _database_trouble(error: Exception) -> str:
    from infra.redaction import redact
    from infra.registry import URL_VARIABLE, default_url, shown_url

    why = (redact(str(getattr(error, "orig", None) or error)).strip() or type(error).__name__).splitlines()[0]
    remedy = f"; is {URL_VARIABLE} right, and the database up?" if URL_VARIABLE in os.environ else ""
    return f"{shown_url(default_url())} cannot be used: {why}{remedy}"


def _load(kind: str, settings: tuple[str, ...], preset: str | None) -> LoadedConfig:
    from flows.config_file import load_config

    path, overrides = split_settings(settings, preset)
    return load_config(kind, path, overrides, preset=preset)
