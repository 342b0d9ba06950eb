"""Other ways to one model, beside a recipe's merged student: weight averaging, and mixed-domain GRPO at equal steps.

    python -m benchmarks.merging RECIPE [--mixed-steps N] [--no-mixed] [--json]

    finished recipe RECIPE ─▶ its models' accuracies ───────────────────────────────┐
    specialists ─▶ mean of their weights ─▶ accuracy per domain                     ├─▶ table, one JSON line
    SFT checkpoint ─▶ train-grpo on all domains' prompts, all rewards ─▶ accuracy ──┘

`RECIPE` is the name of a finished recipe. Mixed-domain GRPO is a run of its own, <RECIPE>-mixed (resumed if it was begun), with
the recipe's `grpo` fields and as many optimizer steps as its specialists had together, so as many samples as well; all domains
must have the same reward functions. `gain kept` is (model − SFT) / (specialist − SFT).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows import prefect_api
from flows.config import GRPORunConfig
from flows.config_file import merge_layers
from flows.recipe_config import MERGED, SFT
from flows.recipe_data import TEACHER_COLUMN, join
from flows.recipe_plan import RECIPE_TAG, STAGE_TAG, Plan
from flows.recipe_report import kept
from flows.recipe_runs import FLOW, config_of_recipe
from infra.registry import Registry, RunRow
from trainers.errors import ConfigError

MEAN, MIXED = "mean", "mixed"


def average_weights(models: Sequence[str], out: Path) -> Path:
    """A model whose every weight is the mean of that of `models`, computed in float64; `out`, made from the first one's folder.

    Raises:
        ConfigError: they have not the same weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, *others = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for model in models)
    states = [other.state_dict() for other in others]
    mean = {}
    for name, value in first.state_dict().items():
        if any(name not in state or state[name].shape != value.shape for state in states):
            raise ConfigError(f"{name} is not a weight of the same shape in all of {', '.join(models)}")
        mean[name] = torch.stack([value.double(), *(state[name].double() for state in states)]).mean(0).to(value.dtype)
    first.load_state_dict(mean)
    shutil.rmtree(out, ignore_errors=True)
    first.save_pretrained(out)
    AutoTokenizer.from_pretrained(models[0]).save_pretrained(out)
    return out


def mixed_config(plan: Plan, start: str, steps: int | None, folder: Path) -> GRPORunConfig:
    """GRPO from the SFT checkpoint on the prompts of all domains. `steps` None: as many as the specialists had together."""
    config, specialists = plan.config, [plan.specialist(name, start) for name in plan.trained]
    domains = [config.domains[name] for name in plan.trained]
    if any(domain.reward_funcs != domains[0].reward_funcs for domain in domains):
        raise ConfigError("the domains have different reward functions: one run cannot tell which is for which prompt")
    form = domains[0].dataset.model_dump(mode="json", include={"prompt_column", "system_prompt"})
    if any(domain.dataset.model_dump(mode="json", include=set(form)) != form for domain in domains):
        raise ConfigError("the domains' data sets have different forms (prompt_column, system_prompt): join them by hand")
    given = {
        "name": f"{config.name}-{MIXED}",
        "model": start,
        "dataset": {**form, "path": str(_joined_rows(plan, folder / "mixed.jsonl"))},
        "reward_funcs": [spec.model_dump(mode="json") for spec in domains[0].reward_funcs],
        "max_steps": steps or sum(one.max_steps for one in specialists),
        "max_completion_length": max(one.max_completion_length for one in specialists),
        "tags": {RECIPE_TAG: str(config.name), STAGE_TAG: MIXED},
        "tracking": config.tracking.model_dump(mode="json"),
        "storage": config.storage.model_dump(mode="json"),
    }
    layers = [("shared", config.shared), ("grpo", config.grpo), ("this benchmark", given)]
    found = merge_layers("grpo", layers).config
    assert isinstance(found, GRPORunConfig), found
    return found


def _joined_rows(plan: Plan, path: Path) -> Path:
    """All columns of the domains' rows, in the order in which the merged student is given their prompts."""
    from trainers.data import load_rows

    datasets = {name: plan.config.domains[name].dataset for name in plan.trained}
    order = Path(join(datasets, path.with_suffix(".order.jsonl"))["path"]).read_text(encoding="utf-8")
    rows, used = {name: load_rows(dataset) for name, dataset in datasets.items()}, Counter[str]()
    with path.open("w", encoding="utf-8") as file:
        for line in order.splitlines():
            name = json.loads(line)[TEACHER_COLUMN]
            file.write(json.dumps(rows[name][used[name]], ensure_ascii=False) + "\n")
            used[name] += 1
    return path


def accuracies(plan: Plan, title: str, model: str, registry: Registry) -> dict[str, float]:
    """Of a model on every domain that has held-out problems."""
    from flows.recipe_accuracy import measure_on

    held_out = [name for name, domain in plan.config.domains.items() if domain.eval is not None]
    return {name: measure_on(plan, name, title, model, registry)["accuracy"] for name in held_out}


def compare(row: RunRow, plan: Plan, mixed: bool, mixed_steps: int | None) -> dict[str, Any]:
    """The recipe's figures and those of the other ways."""
    from flows.launch import launch
    from flows.recipe_accuracy import Accuracy

    registry = Registry()
    folder = Path(str(row.output_dir)) / "beside"
    folder.mkdir(parents=True, exist_ok=True)
    stages = registry.get_run(row.id).stages
    start = stages[SFT]["checkpoint"] if plan.config.sft is not None else plan.config.model
    specialists = [domain.specialist or stages[name]["checkpoint"] for name, domain in plan.config.domains.items()]
    figures = dict(Accuracy(registry, row, plan).all())
    steps = {SFT: 0, MEAN: 0, MERGED: stages[MERGED]["step"], **{name: stages[name]["step"] for name in plan.trained}}
    figures[MEAN] = accuracies(plan, MEAN, str(average_weights(specialists, folder / MEAN)), registry)
    if mixed:
        config = mixed_config(plan, start, mixed_steps, folder)
        known = registry.find_run(str(config.name))
        done = known.stages["train"] if known is not None and known.status == "FINISHED" else launch(config)
        figures[MIXED] = accuracies(plan, MIXED, done["checkpoint"], registry)
        steps[MIXED] = done["step"]
    ways = [way for way in (MERGED, MEAN, MIXED) if way in figures]
    shares = {way: {name: kept({**figures, MERGED: figures[way]}, name) for name in plan.config.domains} for way in ways}
    return {"benchmark": "merging", "recipe": row.name, "accuracy": figures, "steps": steps, "kept": shares}


def table(found: Mapping[str, Any], domains: Sequence[str]) -> str:
    lines = [f"| model | steps | {' | '.join(domains)} | gain kept |", "| --- |" + " ---: |" * (len(domains) + 2)]
    for model, values in found["accuracy"].items():
        shares = [f"{share:.0%}" for share in found["kept"].get(model, {}).values() if share is not None]
        cells = [f"{values[name]:.3f}" if name in values else "" for name in domains]
        lines.append(f"| {model} | {found['steps'].get(model, '')} | {' | '.join(cells)} | {', '.join(shares)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of a finished recipe")
    parser.add_argument("--mixed-steps", type=int, metavar="N", help="of mixed-domain GRPO; default: its specialists' together")
    parser.add_argument("--no-mixed", action="store_true", help="weight averaging alone")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    args = parser.parse_args()
    row = Registry().get_run(args.recipe)
    if row.flow != FLOW or row.status != "FINISHED":
        parser.error(f"{args.recipe} is no finished recipe: flow {row.flow}, {row.status}")
    plan = Plan(config_of_recipe(row))
    with prefect_api.api(), contextlib.redirect_stdout(sys.stderr):
        found = compare(row, plan, not args.no_mixed, args.mixed_steps)
    if not args.json:
        print(table(found, list(plan.config.domains)))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
