"""The course of a recipe: which stage begins from what, and what is measured in between.

    base ─▶ SFT ─▶ specialists ─▶ joined prompts ─▶ merged student        each is made once, whoever resumes the recipe

No Prefect, no MLflow: what does the work is given.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from flows.recipe_config import BASE, MERGED, SFT
from flows.recipe_data import JOINED, join, joined_from
from flows.recipe_plan import Plan
from flows.recipe_stages import StageRuns
from infra.registry import Registry, RunRow
from trainers.errors import ConfigError
from trainers.references import resolve


class Measures(Protocol):
    """`flows.recipe_accuracy.Accuracy`."""

    def measure(self, title: str, model: str, parent_run: str | None) -> bool: ...


class Course:
    """Of the recipe whose row is `row`. `parent_run`: its MLflow run, if it is known; `on_change`: called after each stage."""

    def __init__(
        self,
        registry: Registry,
        row: RunRow,
        plan: Plan,
        runs: StageRuns,
        accuracy: Measures,
        on_change: Callable[[], None],
        parent_run: str | None = None,
    ) -> None:
        self._registry, self._row, self._plan, self._runs = registry, row, plan, runs
        self._accuracy, self._on_change, self._parent = accuracy, on_change, parent_run
        self._folder = Path(str(row.output_dir))

    def run(self) -> dict[str, Any]:
        """Every stage that is not done yet; what the merged student is."""
        plan, config = self._plan, self._plan.config
        start = config.model
        if config.sft is not None:
            self._measure(BASE, config.model)
            start = self._runs.train({SFT: plan.sft(self._parent)})[SFT]["checkpoint"]
        self._measure(SFT, start)
        made = self._runs.train({name: plan.specialist(name, start, self._parent) for name in plan.trained})
        specialists = {
            name: domain.specialist or made[name]["checkpoint"] for name, domain in config.domains.items()
        }  # in the config's order, which is that of the teachers' indices
        for name, model in specialists.items():
            self._measure(name, model)
        merge = plan.merge(start, specialists, self._join(), self._parent)
        merged = self._runs.train({MERGED: merge})[MERGED]
        self._measure(MERGED, merged["checkpoint"])
        return merged

    def _join(self) -> str:
        """The prompts of all domains in one file, made again where it is gone, and anew for other data sets; its path.

        Raises:
            ConfigError: the data sets hold something else than when they were joined.
        """
        datasets = {name: domain.dataset for name, domain in self._plan.config.domains.items()}
        noted, told = self._registry.get_run(self._row.id).stages.get(JOINED), joined_from(datasets)
        # Other ones are those of a config that changed before the student trained.
        known = noted if noted is not None and noted["of"] == told else None
        if known is not None and Path(known["path"]).is_file():
            return known["path"]
        if known is None:
            self._registry.set_stage(self._row.id, JOINED, None)  # before its file is another one
        data = {**join(datasets, self._folder / "prompts.jsonl"), "of": told}
        if known is not None and known["fingerprint"] != data["fingerprint"]:
            raise ConfigError(
                f"the domains' data sets have changed since the prompts were joined (fingerprint {known['fingerprint']}, now "
                f"{data['fingerprint']}): restore them, or choose another name for the recipe"
            )
        self._note_lineage(data)
        self._registry.set_stage(self._row.id, JOINED, data)
        print(f"{sum(data['rows'].values())} prompts in {data['path']}, fingerprint {data['fingerprint']}", flush=True)
        return data["path"]

    def _note_lineage(self, data: dict[str, Any]) -> None:
        """The joined prompts were made from the domains' data sets, as specialists' runs have noted them."""
        joined = self._registry.record_artefact("dataset", data["path"], "prompts.jsonl", digest=data["fingerprint"])
        for domain in self._plan.config.domains.values():
            path = resolve(domain.dataset.path)
            known = self._registry.find_artefacts(path)
            row = known[-1] if known else self._registry.record_artefact("dataset", path, Path(path).name)
            self._registry.link(row.id, joined.id)

    def _measure(self, title: str, model: str) -> None:
        if self._accuracy.measure(title, model, self._parent):
            self._on_change()
