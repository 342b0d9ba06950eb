"""What a recipe found, as a page: the accuracy of base, SFT, every specialist and the merged student on every domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.recipe_config import BASE, MERGED, SFT, RecipeConfig

Accuracies = Mapping[str, Mapping[str, float]]  # model → domain → accuracy


def models_of(config: RecipeConfig) -> list[str]:
    """The models of a recipe, in the order in which they are made."""
    return [*([BASE] if config.sft is not None else []), SFT, *config.domains, MERGED]


def kept(accuracies: Accuracies, domain: str) -> float | None:
    """Share of the specialist's gain over the SFT checkpoint that the student has; None: not measured, or nothing gained."""
    values = [accuracies.get(model, {}).get(domain) for model in (SFT, domain, MERGED)]
    before, best, after = values
    if before is None or best is None or after is None or best <= before:
        return None
    return (after - before) / (best - before)


def summary(config: RecipeConfig, accuracies: Accuracies) -> dict[str, Any]:
    """The recipe's figures, ready for JSON."""
    return {
        "recipe": config.name,
        "accuracy": {model: dict(accuracies.get(model, {})) for model in models_of(config)},
        "kept": {domain: kept(accuracies, domain) for domain in config.domains},
    }


def markdown(config: RecipeConfig, accuracies: Accuracies, runs: Mapping[str, str]) -> str:
    """The flow run's page. `runs`: of the stages, with their state."""
    domains = list(config.domains)
    lines = [f"# {config.name}", "", f"| model | {' | '.join(domains)} |", "| --- |" + " ---: |" * len(domains)]
    for model in models_of(config):
        title = (
            f"specialist of {model}" if model in config.domains else {SFT: "SFT", MERGED: "merged student"}.get(model, model)
        )
        cells = [_figure(accuracies.get(model, {}).get(domain), bold=domain == model) for domain in domains]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    shares = [kept(accuracies, domain) for domain in domains]
    lines.append(f"| gain kept | {' | '.join('' if share is None else f'{share:.0%}' for share in shares)} |")
    lines += [
        "",
        "Accuracy of greedy completions on each domain's held-out problems. Gain kept: (merged − SFT) / (specialist − SFT).",
    ]
    lines += ["", "| run | state |", "| --- | --- |", *(f"| {name} | {state} |" for name, state in runs.items())]
    return "\n".join(lines) + "\n"


def _figure(value: float | None, bold: bool) -> str:
    text = "" if value is None else f"{value:.3f}"
    return f"**{text}**" if bold and text else text
