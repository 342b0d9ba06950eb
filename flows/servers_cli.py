"""`loopwright servers`: the student servers of a run that trains, from another shell, and those that are kept by a name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from infra.registry import RunRow

ANSWER_S = 30.0
PROBE_S = 150.0  # a server given by its address is asked what it can do, which takes a while on a busy machine


@click.group()
def servers() -> None:
    """Look at servers kept by a name, and at those of a running experiment; add some to it, take some away."""


@servers.command("list")
@click.argument("run", required=False)
def list_servers(run: str | None) -> None:
    """Servers of RUN (name or id): whether they answer, and the policy version that the trainer gave them last. Without RUN:
    those that are kept by a name (`loopwright serve`, flow `serve`), which runs name by `servers.student.url=name:X`."""
    if run is None:
        _list_kept()
        return
    from flows.server_health import answers
    from flows.text_table import print_table
    from trainers.roster import read_servers, read_serving

    folder = _folder(_running(run))
    held = {server.url: server for server in read_serving(folder)}
    rows = [("NAME", "ADDRESS", "HEALTH", "VERSION", "")]
    for listed in read_servers(folder):
        known = held.get(listed.url)
        version = "" if known is None or known.version is None else str(known.version)
        why = "not with the trainer yet" if known is None else known.why
        rows.append((listed.name, listed.url, "up" if answers(listed.url) else "no answer", version, why))
    print_table(rows)


def _list_kept() -> None:
    from datetime import datetime

    from flows.server_health import answers
    from flows.text_table import print_table
    from infra.registry import Registry
    from infra.server_names import kept

    rows = [("NAME", "ADDRESS", "HEALTH", "HOST", "SINCE", "MODEL")]
    for row in kept(Registry()):
        since = f"{datetime.fromtimestamp(row.started_at):%Y-%m-%d %H:%M:%S}"
        health = "up" if answers(row.url) else "no answer"
        rows.append((row.name, row.url, health, row.host, since, row.details.get("model", "")))
    print_table(rows)


@servers.command()
@click.argument("run")
@click.option("--url", help="Address of a server that is up, or name:X of one kept by a name. It must accept the run's key.")
@click.option("--count", type=click.IntRange(min=1), help="Servers to start, like the run's others. Default 1.")
def add(run: str, url: str | None, count: int | None) -> None:
    """Give RUN a server more: one at --url, or --count that it starts itself. It gets the current weights first."""
    click.echo(_ask(run, "add", url, count))


@servers.command()
@click.argument("run")
@click.option("--url", help="Address of the server, or name:X; one that the run started is stopped.")
@click.option("--count", type=click.IntRange(min=1), help="Of the servers that the run started, this many newest. Default 1.")
def remove(run: str, url: str | None, count: int | None) -> None:
    """Take a server away from RUN: its requests go to the others, its GPUs are free again."""
    click.echo(_ask(run, "remove", url, count))


def _ask(run: str, action: Literal["add", "remove"], url: str | None, count: int | None) -> str:
    from flows.config_servers import http_address
    from flows.server_requests import ask
    from infra.registry import Registry
    from infra.server_names import PREFIX, find

    if url is not None and count is not None:
        raise click.UsageError("give --url or --count, not both")
    try:
        url = http_address(url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from None
    if url is not None and url.startswith(PREFIX):
        url = find(Registry(), url.removeprefix(PREFIX)).url
    return ask(_folder(_running(run)), action, url, count or 1, ANSWER_S if url is None else PROBE_S)


def _running(name: str) -> RunRow:
    from flows.config import GeneratingRunConfig
    from flows.runs import config_of
    from flows.server_requests import ServersRefused
    from infra.reaper import owner_alive
    from infra.registry import Registry

    run = Registry().get_run(name)
    if run.status != "RUNNING" or run.owner is None or not owner_alive(run.owner):
        raise ServersRefused(f"run {run.name} is not running ({run.status}): it has no servers")
    if not isinstance(config_of(run), GeneratingRunConfig):
        raise ServersRefused(f"run {run.name} generates nothing, so it has no servers")
    return run


def _folder(run: RunRow) -> Path:
    assert run.output_dir is not None, run.id
    return Path(run.output_dir)
