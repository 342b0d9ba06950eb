"""`loopwright reproduce RUN`."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--name", help="Name of the new run. Default: RUN's with -r2, -r3, ….")
@click.option("--check", is_flag=True, help="Only print what differs from then; exit code 1 if data or model do.")
@click.option("--accept-differences", is_flag=True, help="Start although data or model are not what they were.")
def reproduce(run: str, overrides: tuple[str, ...], name: str | None, check: bool, accept_differences: bool) -> None:
    """Start RUN again as it was, as a new run linked to it.

    RUN is a run's name or id, or a folder that holds a provenance.json (a run's or a checkpoint's). First prints what differs
    between then and now: data and model (marked `!`; these refuse the start), packages, code, files, machine. FIELD=VALUE
    changes a field on purpose.
    """
    from flows.reproduce import plan, start

    found = plan(run, overrides, name)
    click.echo(f"{found.source}, {f'attempt {found.attempt}' if found.attempt else 'its config'}, against now:")
    click.echo("\n".join(found.lines()))
    if check:
        sys.exit(1 if found.serious or found.unknown else 0)
    start(found, accept_differences)
