"""What a sweep found, as a page, as JSON and as pictures: the best trial, what mattered, every trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.sweep_config import SweepConfig
from flows.sweep_outcome import latest
from flows.sweep_space import trial_name
from infra.registry_records import TrialRow

FEW = "too few finished trials with different values to say"


def summary(config: SweepConfig, rows: Sequence[TrialRow], importance: dict[str, float] | None = None) -> dict[str, Any]:
    """The sweep's figures, ready for JSON; `importance` None: not asked for (the sweep is not over)."""
    trials = latest(list(rows))
    shown = [_row(config, row) for row in trials]
    finished = (row for row in shown if row["status"] == "FINISHED")
    ranked = sorted(finished, key=lambda row: row["value"], reverse=not config.minimizes)
    return {
        "sweep": config.name,
        "metric": config.metric,
        "direction": "minimize" if config.minimizes else "maximize",
        "trials": config.trial_count,
        "counts": {
            status: sum(row.status == status for row in trials) for status in ("FINISHED", "PRUNED", "FAILED", "RUNNING")
        },
        "best": {name: ranked[0][name] for name in ("trial", "run", "value", "params")} if ranked else None,
        "importance": importance,
        "rows": shown,
    }


def counted(found: dict[str, Any]) -> str:
    """How many trials have ended, and how."""
    return ", ".join(f"{count} {status.lower()}" for status, count in found["counts"].items() if count) or "none yet"


def markdown(found: dict[str, Any]) -> str:
    """The flow run's page."""
    lines = [f"# Sweep {found['sweep']}", "", f"{found['trials']} trials: {counted(found)}."]
    best = found["best"]
    if best is None:
        lines += ["", "No trial has a value yet."]
    else:
        lines += ["", f"**Best**: run `{best['run']}`, {found['metric']} **{best['value']:.6g}** ({found['direction']})", ""]
        lines += _table(["field", "value"], [[f"`{name}`", _cell(value)] for name, value in best["params"].items()])
    if found["importance"] is not None:
        lines += ["", "## What mattered", ""]
        rows = [[f"`{name}`", f"{share:.3f}"] for name, share in found["importance"].items()]
        lines += _table(["field", "importance"], rows) if rows else [f"{FEW.capitalize()}."]
    lines += ["", "## Trials", ""]
    names = list(dict.fromkeys(name for row in found["rows"] for name in row["params"]))
    cells = [
        [str(row["trial"]), row["status"], _cell(row["value"]), *(_cell(row["params"].get(name)) for name in names)]
        for row in found["rows"]
    ]
    lines += _table(["trial", "status", found["metric"], *(f"`{name}`" for name in names)], cells)
    return "\n".join(lines) + "\n"


def write(folder: Path, found: dict[str, Any]) -> Path:
    """`sweep.json`, `sweep.md`, `history.png` and, where it is known, `importance.png`; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "sweep.md").write_text(markdown(found), encoding="utf-8")
    _plot_history(folder / "history.png", found)
    if found["importance"]:
        _plot_importance(folder / "importance.png", found["importance"])
    return folder


def best_so_far(found: dict[str, Any]) -> list[tuple[float, float]]:
    """(value, best value until then) of finished trials, in the order they ended."""
    better = min if found["direction"] == "minimize" else max
    line: list[tuple[float, float]] = []
    for row in sorted(found["rows"], key=lambda row: row["ended_at"] or 0.0):
        if row["status"] == "FINISHED":
            line.append((row["value"], better([row["value"], *(best for _, best in line[-1:])])))
    return line


def _plot_history(path: Path, found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window, no state of the process
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    line = best_so_far(found)
    places = range(1, len(line) + 1)
    axes.plot(places, [value for value, _ in line], "o", label="trial")
    axes.step(places, [best for _, best in line], where="post", label="best so far")
    axes.set(xlabel="finished trials, in the order they ended", ylabel=found["metric"], title=f"Sweep {found['sweep']}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path, dpi=120)


def _plot_importance(path: Path, importance: dict[str, float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1 + 0.45 * len(importance)), layout="constrained")
    axes = figure.subplots()
    names = list(importance)[::-1]
    axes.barh(names, [importance[name] for name in names])
    axes.set(xlabel="importance", xlim=(0, 1))
    figure.savefig(path, dpi=120)


def _row(config: SweepConfig, row: TrialRow) -> dict[str, Any]:
    return {
        "trial": row.number,
        "run": trial_name(str(config.name), row.number),
        "status": row.status,
        "value": row.value,
        "attempts": row.attempt,
        "ended_at": row.ended_at,
        "params": row.params,
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]
