"""A recipe in MLflow: one parent run for its whole life, whose children are its stages' runs and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.artifacts import quietly
from flows.parent_tracking import ParentTracking
from flows.recipe_config import BASE, MERGED, SFT, RecipeConfig
from flows.recipe_plan import RECIPE_TAG
from flows.recipe_report import Accuracies, kept
from infra.registry import Registry, RunRow
from infra.tracking import EndStatus


class RecipeTracking(ParentTracking):
    """The parent run while the recipe works."""

    def __init__(self, registry: Registry, row: RunRow, config: RecipeConfig) -> None:
        self._config, self._folder = config, Path(str(row.output_dir))
        tags = {**config.tags, RECIPE_TAG: row.name}
        params = {"recipe": config.model_dump(mode="json")}
        super().__init__(row, self._folder, config.tracking, tags, params, registry.update_run)

    def end(self, status: EndStatus, cause: str | None, failure: str | None, accuracies: Accuracies, page: str) -> None:
        """How it ended, with all that was measured; step 0 is the base, 1 SFT, 2 each domain's specialist, 3 the student."""
        for step, values in enumerate(by_stage(self._config, accuracies)):
            self._tracker.log(step, {f"recipe/accuracy/{domain}": value for domain, value in values.items()})
            self._tracker.commit(step)
        shares = {domain: kept(accuracies, domain) for domain in self._config.domains}
        self._tracker.set_tags(
            {f"loopwright.kept.{name}": f"{share:.3f}" for name, share in shares.items() if share is not None}
        )
        report = quietly(lambda: self._write(accuracies, page), "the recipe's folder")
        if report is not None:
            self._tracker.log_artifact_dir(report, "recipe")
        self._tracker.close(status, cause, failure)

    def _write(self, accuracies: Accuracies, page: str) -> Path:
        folder = self._folder / "report"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({model: dict(values) for model, values in accuracies.items()}, indent=2, ensure_ascii=False)
        (folder / "accuracy.json").write_text(text + "\n", encoding="utf-8")
        (folder / "recipe.md").write_text(page, encoding="utf-8")
        return folder


def by_stage(config: RecipeConfig, accuracies: Accuracies) -> list[dict[str, Any]]:
    """Accuracy by domain of base, SFT, each domain's own specialist, merged student; of stages that were measured so far."""
    own = {name: accuracies[name][name] for name in config.domains if name in accuracies.get(name, {})}
    return [dict(values) for values in (accuracies.get(BASE, {}), accuracies.get(SFT, {}), own, accuracies.get(MERGED, {}))]
