"""`loopwright runs`: look at runs in the registry. Imports what a command needs only when it runs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from flows.text_table import print_table

if TYPE_CHECKING:
    from infra.registry import RunRow

STATUS = click.Choice(["pending", "running", "finished", "failed", "killed"], case_sensitive=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def runs() -> None:
    """Look at runs in the registry."""


@runs.command("list")
@click.option("--status", type=STATUS, help="Only runs of this status.")
@click.option("--flow", help="Only runs of this flow (train-grpo, sft-long-context, …).")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Only runs with this tag; several: with all of them.")
@click.option("--sweep", metavar="NAME", help="Only trials of this sweep.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many, the newest. Default: all.")
@JSON
def list_runs(
    status: str | None, flow: str | None, tags: tuple[str, ...], sweep: str | None, limit: int | None, as_json: bool
) -> None:
    """All runs, newest first."""
    from infra.registry import Registry

    for tag in tags:
        if "=" not in tag:
            raise click.BadParameter(f"`{tag}` is not of the form KEY=VALUE", param_hint="--tag")
    registry = Registry()
    if sweep is not None:
        registry.get_sweep(sweep)
    rows = registry.list_runs(
        status=status.upper() if status else None,  # type: ignore[arg-type]
        limit=limit,
        flow=flow,
        tags=dict(tag.split("=", 1) for tag in tags),
        sweep=sweep,
        light=True,
    )
    if as_json:
        from flows.runs_report import summary

        _print_json([summary(row) for row in rows])
    else:
        print_runs(rows)


@runs.command()
@click.argument("run")
@JSON
def show(run: str, as_json: bool) -> None:
    """RUN (name or id): status, progress, costs, attempts, checkpoints, servers, where it came from and what came of it."""
    from flows.runs_report import report
    from infra.registry import Registry

    registry = Registry()
    found = report(registry, registry.get_run(run))
    if as_json:
        _print_json(found)
        return
    _print_facts(found)
    _section(
        ("ATTEMPT", "STATUS", "FAILURE", "FROM STEP", "HOST", "STARTED", "ENDED", "CAUSE"),
        [
            (
                *(str(row["number"]), row["status"], _text(row["failure_class"]), _text(row["resume_step"])),
                *(_text(row["host"]), _time(row["started_at"]), _time(row["ended_at"]), _first(row["cause"])),
            )
            for row in found["attempts"]
        ],
    )
    _section(
        ("CHECKPOINT", "WRITTEN", "PINNED", "WHERE"),
        [
            (str(row["step"]), _time(row["created_at"]), "pinned" if row["pinned"] else "", row["uri"] or row["path"])
            for row in found["checkpoints"]
        ],
    )
    _section(
        ("SERVER", "ADDRESS", "HOST", "STARTED", "ENDED", "LOG"),
        [
            (row["name"], row["url"], row["host"], _time(row["started_at"]), row["exit"] or "", _text(row["log_path"]))
            for row in found["servers"]
        ],
    )
    _print_lineage(found)
    if found["traceback"]:
        click.echo(f"\n{found['traceback'].rstrip()}")


@runs.command()
@click.argument("left", metavar="RUN")
@click.argument("right", metavar="RUN")
@click.option("--all", "everything", is_flag=True, help="Equal values too.")
@JSON
def diff(left: str, right: str, everything: bool, as_json: bool) -> None:
    """What tells two runs apart: config, then results, progress, costs, versions.

    Exit code as that of diff: 0 when both compute the same (their configs are equal but for the name), 1 when the configs
    differ, 2 when a run is not known.
    """
    from flows.runs_report import compare, differing
    from infra.registry import Registry

    registry = Registry()
    one, two = registry.get_run(left), registry.get_run(right)
    sections = compare(registry, one, two, everything)
    if as_json:
        _print_json(sections)
    else:
        for name, fields in sections.items():
            lines = [(field, _value(pair[0]), _value(pair[1])) for field, pair in fields.items()]
            _section((name.upper(), one.name, two.name), lines)
        if not any(sections.values()):
            click.echo(f"{one.name} and {two.name} do not differ")
    sys.exit(1 if differing(one.config, two.config) else 0)


def print_runs(rows: list[RunRow]) -> None:
    """One line each, under a heading."""
    lines = []
    for run in rows:
        step = run.progress.get("step")
        shown = "" if step is None else f"{step}/{run.progress.get('max_steps') or '?'}"
        lines.append((run.name, run.flow, run.status, shown, _time(run.created_at), _first(run.cause)))
    print_table([("NAME", "FLOW", "STATUS", "STEP", "CREATED", "CAUSE"), *lines])


def _print_facts(found: dict[str, Any]) -> None:
    facts = {
        "name": found["name"], "id": found["id"], "flow": found["flow"], "status": found["status"],
        "failure": found["failure_class"], "cause": found["cause"], "config hash": found["config_hash"],
        "folder": found["output_dir"], "MLflow run": found["mlflow_run_id"],
        "Prefect flow run": found["prefect_flow_run_id"], "parent run": found["parent_run"],
    }  # fmt: skip
    for heading, values in (("tag", "tags"), ("progress", "progress"), ("cost", "costs"), ("stage", "stages")):
        facts |= {f"{heading} {name}": _readable(name, value) for name, value in found[values].items()}
    print_table([(name, _value(value)) for name, value in facts.items() if value is not None])


def _readable(name: str, value: Any) -> Any:
    if name.endswith("_at") and isinstance(value, float):
        return _time(value)
    unit = {"gpu_s": "s", "idle_gpu_s": "s", "usd": "USD"}.get(name.partition("/")[0])
    return f"{value:.6g} {unit}" if unit else value


def _print_lineage(found: dict[str, Any]) -> None:
    lines = [
        (heading, row["kind"], _text(row.get("run")), row["uri"])
        for heading, rows in (("from", "parents"), ("made", "made"), ("used for", "children"))
        for row in found["lineage"][rows]
    ]
    _section(("LINEAGE", "KIND", "RUN", "WHERE"), lines)
    _section(("CHILD RUN", "STATUS"), [(row["name"], row["status"]) for row in found["child_runs"]])


def _section(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if rows:
        click.echo()
        print_table([heading, *rows])


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _first(text: str | None) -> str:
    """The first line, which says the cause; what follows is the end of a log."""
    return text.splitlines()[0] if text else ""


def _time(seconds: float | None) -> str:
    from datetime import datetime

    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
