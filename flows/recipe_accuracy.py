"""The accuracies of a recipe's models, measured once each and kept as stages of the recipe's row.

    model, domain ─▶ flow `evaluate`'s measuring ─▶ an MLflow run, child of the recipe's ─▶ stage `accuracy:<model>`

A figure is kept with a hash of what it was measured by: with other held-out problems it is measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flows.evaluate_flow import measure
from flows.evaluate_subject import subject
from flows.recipe_plan import RECIPE_TAG, STAGE_TAG, Plan
from infra.registry import Registry, RunRow, config_hash
from infra.tracking_tags import PARENT_TAG

_STAGE = "accuracy:"


class Accuracy:
    """Of the recipe whose row is `row`."""

    def __init__(self, registry: Registry, row: RunRow, plan: Plan) -> None:
        self._registry, self._row, self._plan = registry, row, plan
        self._by = {name: _measured_by(plan, name) for name in plan.config.domains}

    def all(self) -> dict[str, dict[str, float]]:
        """Model → domain → accuracy, of all that was measured so far."""
        return {
            stage.removeprefix(_STAGE): {name: figure["accuracy"] for name, figure in self._valid(figures).items()}
            for stage, figures in self._registry.get_run(self._row.id).stages.items()
            if stage.startswith(_STAGE)
        }

    def measure(self, title: str, model: str, parent_run: str | None) -> bool:
        """A model (folder, hub id) on every domain on which it was not measured yet; whether there was one.

        Raises:
            RunFailed: an evaluation has failed, and its retry policy is used up.
        """
        figures = self._valid(self._registry.get_run(self._row.id).stages.get(_STAGE + title, {}))
        figures = {name: figure for name, figure in figures.items() if figure.get("model") == model}
        domains = [name for name, by in self._by.items() if by is not None and name not in figures]
        tags = {PARENT_TAG: parent_run} if parent_run else {}
        for name in domains:
            found = measure_on(self._plan, name, title, model, self._registry, tags)
            figures[name] = {"accuracy": found["accuracy"], "scored": found["scored"], "model": model, "by": self._by[name]}
            self._registry.set_stage(self._row.id, _STAGE + title, figures)
        return bool(domains)

    def _valid(self, figures: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Those that were measured by what the config says now."""
        return {name: figure for name, figure in figures.items() if figure["by"] == self._by.get(name)}


def measure_on(
    plan: Plan, domain: str, title: str, model: str, registry: Registry, tags: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What flow `evaluate` finds of a model on a domain that has held-out problems. `tags`: more of its MLflow run's."""
    config = plan.evaluation(domain, model)
    assert config is not None, domain
    config = config.model_copy(update={"name": f"{plan.config.name}-{title}-on-{domain}"})
    tags = {RECIPE_TAG: str(plan.config.name), STAGE_TAG: title, **(tags or {})}
    return measure(config, replace(subject(config, registry), tags=tags), registry)


def _measured_by(plan: Plan, name: str) -> str | None:
    config = plan.evaluation(name, "")
    return None if config is None else config_hash(config.model_dump(mode="json", exclude={"tracking", "retry"}))
