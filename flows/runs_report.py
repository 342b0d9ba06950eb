"""What the registry knows of runs, as plain data: one run whole, or what tells two apart. No Prefect, MLflow or torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.registry import ArtefactRow, Registry, RunRow

ABSENT = "–"  # a value that one of two runs does not have
_NEVER_EQUAL = ("name", "updated_at", "eta_s")  # in no two runs, whatever they compute


def summary(run: RunRow) -> dict[str, Any]:
    """A run in a list; `run` may be a light row."""
    return {
        "name": run.name,
        "id": run.id,
        "flow": run.flow,
        "status": run.status,
        "failure_class": run.failure_class,
        "cause": run.cause,
        "tags": run.tags,
        "config_hash": run.config_hash,
        "parent_run_id": run.parent_run_id,
        "mlflow_run_id": run.mlflow_run_id,
        "prefect_flow_run_id": run.prefect_flow_run_id,
        "output_dir": run.output_dir,
        "progress": shown_progress(run),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
    }


def report(registry: Registry, run: RunRow) -> dict[str, Any]:
    """Everything about one run, JSON-ready."""
    parent = registry.find_run(run.parent_run_id) if run.parent_run_id else None
    children = registry.list_runs(parent=run.id, light=True)
    return {
        **summary(run),
        "traceback": run.traceback,
        "config": run.config,
        "stages": run.stages,
        "attempts": [_columns(row) for row in registry.list_attempts(run.id)],
        "checkpoints": [_columns(row) for row in registry.list_checkpoints(run.id)],
        "servers": [_columns(row) for row in registry.list_servers(run.id)],
        "costs": registry.costs(run.id),
        "costs_by_attempt": [_columns(row) for row in registry.list_costs(run.id)],
        "lineage": lineage(registry, run),
        "parent_run": parent.name if parent else None,
        "child_runs": [{"name": row.name, "id": row.id, "status": row.status} for row in reversed(children)],
    }


def lineage(registry: Registry, run: RunRow) -> dict[str, list[dict[str, Any]]]:
    """`made`: the run's artefacts; `parents`: what they were made from; `children`: what others made from them."""
    made = registry.list_artefacts(run.id)
    own = {row.id for row in made}
    names: dict[str, str] = {}

    def shown(rows: Iterable[ArtefactRow]) -> list[dict[str, Any]]:
        found = {row.id: row for row in rows if row.id not in own}
        for row in found.values():
            if row.run_id and row.run_id not in names:
                other = registry.find_run(row.run_id)
                names[row.run_id] = other.name if other else row.run_id
        return [{**_columns(row), "run": names.get(row.run_id or "")} for row in found.values()]

    return {
        "parents": shown(parent for row in made for parent in registry.parents(row.id)),
        "made": [_columns(row) for row in made],
        "children": shown(child for row in made for child in registry.children(row.id)),
    }


def compare(registry: Registry, left: RunRow, right: RunRow, everything: bool = False) -> dict[str, dict[str, list[Any]]]:
    """By section (`config`, `result`, `progress`, `costs`, `circumstances`) what differs: field → the two values.

    Args:
        everything: equal values too.
    """
    sections: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        "config": (left.config, right.config),
        "result": (_result(left), _result(right)),
        "progress": (shown_progress(left), shown_progress(right)),
        "costs": (registry.costs(left.id), registry.costs(right.id)),
    }
    found = {name: differing(one, two, everything) for name, (one, two) in sections.items()}
    found["circumstances"] = _circumstances(left, right)
    return found


def shown_progress(run: RunRow) -> dict[str, Any]:
    """Without the curve that a sweep compares its trials by; its newest value stays."""
    watched = run.progress.get("watched") or {}
    value = {f"watched {watched.get('metric')}": watched.get("value")} if watched else {}
    return {name: item for name, item in run.progress.items() if name != "watched"} | value


def _result(run: RunRow) -> dict[str, Any]:
    stages = {name: value for stage in run.stages.values() for name, value in stage.items()}
    return {"status": run.status, "failure_class": run.failure_class, **stages}


def differing(left: Mapping[str, Any], right: Mapping[str, Any], everything: bool = False) -> dict[str, list[Any]]:
    """Leaf → the two values, of two trees."""
    from flows.config_file import leaves

    hidden = () if everything else _NEVER_EQUAL
    one, two = (dict(leaves({name: value for name, value in tree.items() if name not in hidden})) for tree in (left, right))
    # Of an empty group the other run's fields tell.
    one, two = ({name: value for name, value in tree.items() if value != {}} for tree in (one, two))
    names = [*one, *(name for name in two if name not in one)]
    pairs = {name: [one.get(name, ABSENT), two.get(name, ABSENT)] for name in names}
    return {name: pair for name, pair in pairs.items() if everything or pair[0] != pair[1]}


def _circumstances(left: RunRow, right: RunRow) -> dict[str, list[Any]]:
    """Data, packages, code and machine, where both runs' folders still tell."""
    from infra import provenance

    facts = [provenance.read(Path(run.output_dir)) if run.output_dir else None for run in (left, right)]
    if facts[0] is None or facts[1] is None:
        return {}
    return {one.what: [one.then, one.now] for one in provenance.differences(facts[0], facts[1])}


def _columns(row: Any) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__table__.columns if column.key != "run_id"}
