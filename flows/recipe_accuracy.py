"""The accuracies of a recipe's models, measured once each and kept as stages of the recipe's row.

    model, domain ─▶ flow `evaluate`'s measuring ─▶ an MLflow run, child of the recipe's ─▶ stage `accuracy:<model>`

A figure is kept with a hash of what it was measured by: with other held-out problems it is measured again.
"""

from __future__ import annotations

from dataclasses import replace

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

    def all(self) -> dict[str, dict[str, float]]:
        """Model → domain → accuracy, of all that was measured so far."""
        wanted = {name: self._measured_by(name) for name in self._plan.config.domains}
        found = {}
        for stage, values in self._registry.get_run(self._row.id).stages.items():
            if stage.startswith(_STAGE):
                known = {name: each["accuracy"] for name, each in values.items() if each["by"] == wanted.get(name)}
                found[stage.removeprefix(_STAGE)] = known
        return found

    def measure(self, title: str, model: str, parent_run: str | None) -> bool:
        """A model (folder, hub id) on every domain on which it was not measured yet; whether there was one.

        Raises:
            RunFailed: an evaluation has failed, and its retry policy is used up.
        """
        known = self.all().get(title, {})
        domains = [name for name in self._plan.config.domains if name not in known and self._measured_by(name) is not None]
        for name in domains:
            config = self._plan.evaluation(name, model)
            assert config is not None, name
            config = config.model_copy(update={"name": f"{self._row.name}-{title}-on-{name}"})
            tags = {RECIPE_TAG: self._row.name, STAGE_TAG: title} | ({PARENT_TAG: parent_run} if parent_run else {})
            found = measure(config, replace(subject(config, self._registry), tags=tags), self._registry)
            stage = self._registry.get_run(self._row.id).stages.get(_STAGE + title, {})
            figure = {"accuracy": found["accuracy"], "scored": found["scored"], "by": self._measured_by(name)}
            self._registry.set_stage(self._row.id, _STAGE + title, {**stage, name: figure})
        return bool(domains)

    def _measured_by(self, name: str) -> str | None:
        config = self._plan.evaluation(name, "")
        return None if config is None else config_hash(config.model_dump(mode="json", exclude={"tracking", "retry"}))
