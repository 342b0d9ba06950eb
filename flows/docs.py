"""Pages made from the code: `python -m flows.docs` writes them, `--check` says which differ and exits with 1.

`docs/metrics.md` comes from the metric catalog, `docs/config.md` from the run configs' JSON schema, which is also what Prefect
makes its run form of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from flows.config import RUN_CONFIGS
from trainers.metrics import ALL, CATALOG, MetricSpec

FOLDER = Path(__file__).resolve().parent.parent / "docs"
MADE_BY = "Made by `python -m flows.docs`; do not edit."

_NAMESPACES = {
    "": "Objective and rewards",
    "clip_ratio": "Clipping",
    "rewards": "Reward functions",
    "eval": "Evaluation",
    "completions": "Completions",
    "rollout": "Generation",
    "tools": "Tools",
    "env": "Environments",
    "sampling": "Sampler mismatch",
    "server": "Servers",
    "sample": "Training samples",
    "batch": "Batches",
    "perf": "Time and speed",
    "loss_by_position": "Loss by position in the sequence",
    "needle": "Numbers found again in long texts",
    "cost": "Costs",
    "recipe": "Recipes (of the parent run; step 0 base, 1 SFT, 2 each domain's specialist, 3 merged student)",
    "sweep": "Sweeps (of the parent run; the step is how many trials have finished)",
}
_REDUCTIONS = {
    "mean": "Σ numerator / Σ denominator over the log window and all ranks",
    "sum": "sum over the log window and all ranks",
    "total": "sum since the run's start, resumes included",
    "max": "largest",
    "min": "smallest",
    "last": "newest value",
}


def metrics_page() -> str:
    """The catalog as Markdown, one table per namespace."""
    lines = [
        "# Metrics",
        "",
        f"{MADE_BY} The catalog is `trainers/metrics.py`: a metric that is not in it cannot be logged.",
        "",
        "Steps are whole optimizer steps, counted from 1 over all attempts of a run. `<func>`, `<cause>`, `<id>` and `<name>`",
        "stand for names; what MLflow does not take in a name becomes `_`. The load of the machine is logged beside these as",
        "`system/…`; there the step is the run's age in seconds.",
        "",
        *_table(["reduction", "means"], [[f"`{name}`", meaning] for name, meaning in _REDUCTIONS.items()]),
    ]
    unknown = {_namespace(name) for name in CATALOG} - set(_NAMESPACES)
    assert not unknown, f"flows/docs.py has no title for the namespaces {sorted(unknown)}"
    ordered = sorted(CATALOG.values(), key=lambda spec: list(_NAMESPACES).index(_namespace(spec.name)))
    for namespace, specs in groupby(ordered, key=lambda spec: _namespace(spec.name)):
        title = _NAMESPACES[namespace]
        lines += ["", f"## {title}" + (f": `{namespace}/`" if namespace else ""), ""]
        lines += _table(["metric", "unit", "reduction", "algorithms", "meaning"], [_metric_row(spec) for spec in specs])
    return "\n".join(lines) + "\n"


def _namespace(name: str) -> str:
    """Of the teachers' own, that of what they are a part of."""
    return name.split("/")[0] if "/" in name and not name.startswith("teacher_") else ""


def _metric_row(spec: MetricSpec) -> list[str]:
    algorithms = "all" if spec.algorithms == ALL else ", ".join(spec.algorithms)
    return [f"`{spec.name}`", spec.unit, spec.reduction, algorithms, spec.meaning]


def config_page() -> str:
    """Fields of the run configs as Markdown: those all flows have, then those of one flow."""
    fields = {name: _fields(model.model_json_schema(mode="validation")) for name, model in RUN_CONFIGS.items()}
    first, *others = fields.values()
    common = [row for name, row in first.items() if all(other.get(name) == row for other in others)]
    lines = [
        "# Run configuration",
        "",
        f"{MADE_BY} `loopwright config show` prints a resolved config.",
        "",
        "A config is a YAML or JSON file; `key=value` on the command line sets a field by its dotted name. Unknown fields are",
        "errors. *Required with* a group: the group may be left out, but not this field of it.",
        "",
        "## All flows",
        "",
        *_table(_COLUMNS, common),
    ]
    for name, rows in fields.items():
        own = [row for row in rows.values() if row not in common]
        lines += ["", f"## `{name}`", "", *_table(_COLUMNS, own)]
    return "\n".join(lines) + "\n"


_COLUMNS = ["field", "type", "default", "meaning"]


def _fields(schema: dict[str, Any]) -> dict[str, list[str]]:
    """Rows by dotted name, in the order of declaration."""
    definitions = schema.get("$defs", {})
    rows: dict[str, list[str]] = {}

    def visit(prefix: str, node: dict[str, Any], optional_group: str) -> None:
        required = set(node.get("required", []))
        for name, field in node["properties"].items():
            path = prefix + name
            nested = _nested(field, definitions)
            if nested is not None:
                visit(path + ".", nested, optional_group if name in required else path)
                continue
            default = f"`{json.dumps(_default(field))}`"
            if name in required:
                default = f"required with `{optional_group}`" if optional_group else "required"
            rows[path] = [f"`{path}`", _type(field, definitions), default, field.get("description", "")]

    visit("", schema, "")
    return rows


def _default(field: dict[str, Any]) -> Any:
    """Pydantic leaves defaults that are made anew each time (`default_factory`) out of the schema: empty ones, here."""
    if "default" in field:
        return field["default"]
    return {"object": {}, "array": []}.get(field.get("type", ""))


def _nested(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The object schema of a group of fields, optional groups included; None for a plain field."""
    references = [option["$ref"] for option in (field, *field.get("anyOf", ())) if "$ref" in option]
    if len(references) != 1:
        return None
    definition = definitions[references[0].rpartition("/")[2]]
    return definition if "properties" in definition else None


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in field:
        return _type(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        return " or ".join(_type(option, definitions) for option in field["anyOf"])
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}), definitions)}"
    if kind == "object":
        return "`path` and `kwargs`" if "path" in field.get("properties", {}) else "mapping"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]}" for key, sign in bounds.items() if key in field]
    return " ".join([kind, ", ".join(limits)]).strip()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(columns), "|" + " --- |" * len(columns), *map(line, rows)]


PAGES = {"metrics.md": metrics_page, "config.md": config_page}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` compare them; the exit code."""
    if any(argument != "--check" for argument in arguments):
        print("usage: python -m flows.docs [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if arguments and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not arguments:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not up to date: {', '.join(stale)}; run `python -m flows.docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
