"""`loopwright checkpoints`: what a run has stored, whether it is whole, which of it stays, and getting it.

RUN is a run's name or id; or the address of its checkpoints, a folder or s3://bucket/prefix/name: then no registry is asked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from infra.storage.checkpoints import CheckpointStore, Listed


@click.group()
def checkpoints() -> None:
    """Look at the checkpoints of a run, check them, pin them, fetch them."""


@checkpoints.command("list")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def list_checkpoints(run: str, as_json: bool) -> None:
    """Checkpoints of RUN, in its folder and in shared storage, oldest first. Files are counted, not read: see `verify`."""
    from flows.text_table import print_table

    rows = [
        {
            "step": entry.step,
            "where": store.uri(entry.step),
            "bytes": entry.manifest.size if entry.manifest else sum(file.size for file in entry.files.values()),
            "pinned": entry.pinned,
            "fault": entry.fault,
            "metrics": dict(entry.metrics),
        }
        for store, entry in _entries(run)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    lines = [("STEP", "BYTES", "PINNED", "STATE", "WHERE")]
    for row in rows:
        pinned, state = "pinned" if row["pinned"] else "", row["fault"] or "complete"
        lines.append((str(row["step"]), f"{row['bytes']:,}", pinned, str(state), str(row["where"])))
    print_table(lines)


@checkpoints.command()
@click.argument("run")
@click.argument("step", type=click.IntRange(min=0), required=False)
def verify(run: str, step: int | None) -> None:
    """Read every file of RUN's checkpoints, or of STEP's, and compare it with its SHA-256. Exit code 1: one is broken."""
    broken = 0
    for store, entry in _entries(run, step):
        why = store.verify(entry)
        broken += why is not None
        click.echo(f"{'BROKEN' if why else 'whole':<6}  {store.uri(entry.step)}{f': {why}' if why else ''}")
    sys.exit(1 if broken else 0)


@checkpoints.command()
@click.argument("run")
@click.argument("step", type=click.IntRange(min=0))
def pin(run: str, step: int) -> None:
    """Keep STEP of RUN whatever retention says."""
    _mark(run, step, pinned=True)


@checkpoints.command()
@click.argument("run")
@click.argument("step", type=click.IntRange(min=0))
def unpin(run: str, step: int) -> None:
    """Leave STEP of RUN to retention again."""
    _mark(run, step, pinned=False)


@checkpoints.command()
@click.argument("run")
@click.argument("step_and_dest", nargs=-1, required=True, metavar="[STEP] DEST")
def fetch(run: str, step_and_dest: tuple[str, ...]) -> None:
    """Copy STEP of RUN, or its newest whole checkpoint, to DEST/checkpoint-STEP, every file checked on the way."""
    from infra.errors import Damaged, NotStored, StorageError

    *steps, dest = step_and_dest
    if len(steps) > 1 or not all(text.isdecimal() for text in steps):
        raise click.UsageError("give RUN, a step (or none, for the newest), and a folder to put it in")
    step, why = int(steps[0]) if steps else None, ""
    for store, entry in reversed(list(_entries(run, step))):
        target = Path(dest) / f"checkpoint-{entry.step}"
        if target.exists():
            raise StorageError(f"{target} exists: name another folder")
        try:
            store.fetch(entry, target)
        except (Damaged, NotStored) as error:
            why = str(error)
            click.echo(f"warning: {why}", err=True)
            continue
        click.echo(str(target))
        return
    raise StorageError(f"nothing whole to fetch of {run}: {why}")


def _is_address(run: str) -> bool:
    return "/" in run or run.startswith(".")


def _stores(run: str) -> list[CheckpointStore]:
    """Of a run: its folder, then shared storage; of an address: that."""
    from infra.storage import is_remote, open_storage
    from infra.storage.base import folder_of
    from infra.storage.checkpoints import CheckpointStore

    if _is_address(run):
        if not is_remote(run) and not folder_of(run).is_dir():
            raise click.BadParameter(f"there is no folder {run}", param_hint="RUN")
        return [CheckpointStore(open_storage(run))]
    from flows.runs import config_of
    from infra.registry import Registry

    row = Registry().get_run(run)
    stores = [CheckpointStore(open_storage(row.output_dir))] if row.output_dir and Path(row.output_dir).is_dir() else []
    storage = config_of(row).storage.of_run(row.name)
    return [*stores, storage.store()] if storage.uri is not None else stores


def _entries(run: str, step: int | None = None) -> Iterator[tuple[CheckpointStore, Listed]]:
    """By step, and of one step the folder's first.

    Raises:
        NotStored: there is none (of `step`).
    """
    from infra.errors import NotStored

    there = [(store, entry) for store in _stores(run) for entry in store.listed().values()]
    found = [(store, entry) for store, entry in there if step in (None, entry.step)]
    if not there:
        raise NotStored(f"{run} has no checkpoints")
    if not found:
        known = ", ".join(map(str, sorted({entry.step for _, entry in there})))
        raise NotStored(f"{run} has no checkpoint of step {step} (checkpoints: {known})")
    yield from sorted(found, key=lambda pair: pair[1].step)


def _mark(run: str, step: int, *, pinned: bool) -> None:
    """The marker beside the checkpoint is what counts; the registry has a copy."""
    for store, entry in _entries(run, step):
        (store.pin if pinned else store.unpin)(step)
        click.echo(f"{'pinned' if pinned else 'unpinned'} {store.uri(entry.step)}")
    if _is_address(run):
        return
    from infra.registry import Registry

    with suppress(Exception):
        registry = Registry()
        registry.update_checkpoint(registry.get_run(run).id, step, pinned=pinned)
