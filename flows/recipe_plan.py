"""From a recipe's config to the run config of every stage, all of them checked before the first one starts.

    shared ▸ sft ─────────────────────┐
    shared ▸ grpo ▸ domain's overrides ┼─▶ merge_layers ─▶ run configs <name>-sft, <name>-<domain>, <name>-merged
    shared ▸ merge ───────────────────┘

Pure: the models that later stages begin from are arguments, because only the stages before know them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from flows.config import GRPORunConfig, RunConfig, SFTRunConfig
from flows.config_file import ConfigErrors, describe, merge_into, merge_layers, nest, parse_override, read_tree
from flows.evaluate_config import EvaluateConfig
from flows.recipe_config import MERGED, SFT, RecipeConfig
from infra.tracking_tags import PARENT_TAG

RECIPE_TAG, STAGE_TAG = "loopwright.recipe", "loopwright.stage"
LATER = "<made by an earlier stage>"  # a model or data set while only the fields are checked
_PYTHON = re.compile(r"(.+\.py):(\w+)\Z")

# What the recipe gives a stage itself, and where its value is said instead.
_SAID_ELSEWHERE = {
    "name": "`name` of the recipe",
    "type": "the stage",
    "sweep": "nothing: a recipe's stages are no trials",
    "model": "`model` of the recipe",
    "tags": "`tags` of the recipe",
    "tracking": "`tracking` of the recipe",
    "storage": "`storage` of the recipe",
}
_OF_DOMAINS = {"dataset": "`domains.<name>.dataset`", "reward_funcs": "`domains.<name>.reward_funcs`"}


class Plan:
    """What the stages of one recipe are. `config.name` is set.

    Raises:
        ConfigErrors: a stage says what is said elsewhere; one line per problem.
    """

    def __init__(self, config: RecipeConfig) -> None:
        self.config = config
        lines = list(_misplaced("shared", config.shared, {**_SAID_ELSEWHERE, **_OF_DOMAINS, "eval": "the stages"}))
        lines += _misplaced("sft", config.sft or {}, _SAID_ELSEWHERE)
        lines += _misplaced("grpo", config.grpo, {**_SAID_ELSEWHERE, **_OF_DOMAINS})
        lines += _misplaced("merge", config.merge, {**_SAID_ELSEWHERE, **_OF_DOMAINS})
        for name, domain in config.domains.items():
            lines += _misplaced(f"domains.{name}.overrides", domain.overrides, {**_SAID_ELSEWHERE, **_OF_DOMAINS})
        teachers = (config.merge.get("servers") or {}).get("teachers") or {}
        unknown = [name for name in teachers if name not in config.domains]
        lines += [f"merge.servers.teachers.{name}: there is no such domain: {', '.join(config.domains)}" for name in unknown]
        lines += [
            f"merge.servers.teachers.{name}.url: the specialist that is trained for this domain would teach nobody: leave it "
            f"out, or name the model behind it as `domains.{name}.specialist`"
            for name in self.trained
            if (teachers.get(name) or {}).get("url")
        ]
        if lines:
            raise ConfigErrors(lines)

    @property
    def trained(self) -> list[str]:
        """Domains whose specialist is trained here."""
        return [name for name, domain in self.config.domains.items() if domain.specialist is None]

    def run_name(self, stage: str) -> str:
        return f"{self.config.name}-{stage}"

    def sft(self, parent_run: str | None = None) -> SFTRunConfig:
        """Raises `ConfigErrors`, as all of these do. `parent_run`: the recipe's MLflow run, if it is known."""
        assert self.config.sft is not None
        return cast(SFTRunConfig, self._build("sft", SFT, [("sft", self.config.sft)], self.config.model, parent_run))

    def specialist(self, name: str, model: str, parent_run: str | None = None) -> GRPORunConfig:
        """The GRPO run of a domain, which begins from `model`."""
        domain = self.config.domains[name]
        data = domain.model_dump(mode="json", exclude_unset=True)
        own = {field: data[field] for field in ("dataset", "reward_funcs")}
        layers = [("grpo", self.config.grpo), (f"domains.{name}.overrides", domain.overrides)]
        if domain.eval is not None and any("eval" in layer for _, layer in layers):
            own["eval"] = data["eval"]
        layers = [*layers, (f"domains.{name}", own)]
        return cast(GRPORunConfig, self._build("grpo", name, layers, model, parent_run))

    def merge(self, model: str, teachers: Mapping[str, str], dataset: str, parent_run: str | None = None) -> Any:
        """The distillation run: `model` taught by `teachers` (domain → model) on the prompts of `dataset`."""
        served = (self.config.merge.get("servers") or {}).get("teachers") or {}  # one that is up is asked as it is
        own = {name: {} if (served.get(name) or {}).get("url") else {"model": path} for name, path in teachers.items()}
        given = {"dataset": {"path": dataset}, "servers": {"teachers": own}}
        return self._build("distillation", MERGED, [("merge", self.config.merge), ("the recipe", given)], model, parent_run)

    def evaluation(self, name: str, model: str) -> EvaluateConfig | None:
        """Measuring a model (folder, hub id) on the domain `name`; None: it has no held-out problems."""
        domain = self.config.domains[name]
        if domain.eval is None:
            return None
        stage = self.specialist(name, LATER) if domain.specialist is None else self.merge(LATER, self._no_teachers(), LATER)
        fields = {
            "model": model,
            "dataset": domain.eval.dataset.model_dump(mode="json"),
            "reward_func": (domain.eval.reward_func or domain.reward_funcs[0]).model_dump(mode="json"),
            "max_completion_length": domain.eval.max_completion_length or stage.max_completion_length,
            "dtype": stage.dtype,
            "trust_remote_code": stage.trust_remote_code,
            "chat_template_kwargs": stage.chat_template_kwargs,
            "tracking": self.config.tracking.model_dump(mode="json"),
            "retry": stage.retry.model_dump(mode="json"),
        }
        return EvaluateConfig.model_validate(fields)

    def stages(self) -> list[RunConfig]:
        """The run config of every stage, with stand-ins for what earlier ones make.

        Raises:
            ConfigErrors: with all that is wrong, stage by stage.
        """
        start = LATER if self.config.sft is not None else self.config.model
        makers: list[Callable[[], RunConfig]] = [self.sft] if self.config.sft is not None else []
        makers += [lambda name=name: self.specialist(name, start) for name in self.trained]
        makers += [lambda: self.merge(start, self._no_teachers(), LATER)]
        found, lines = [], []
        for make in makers:
            try:
                found.append(make())
            except ConfigErrors as error:
                lines += [line for line in error.lines if line not in lines]
        lines += [
            f"stage {stage.tags[STAGE_TAG]}: peft: its checkpoint would be an adapter, and the next stage needs a whole model: "
            "leave it out of `shared`, `sft`, `grpo` and `overrides`; in `merge` it may be set"
            for stage in found
            if stage.peft is not None and stage.name != self.run_name(MERGED)
        ]
        if lines:
            raise ConfigErrors(lines)
        return found

    def _no_teachers(self) -> dict[str, str]:
        return {name: domain.specialist or LATER for name, domain in self.config.domains.items()}

    def _build(
        self, kind: str, stage: str, layers: list[tuple[str, dict[str, Any]]], model: str, parent_run: str | None
    ) -> RunConfig:
        config = self.config
        tags = {**config.tags, RECIPE_TAG: str(config.name), STAGE_TAG: stage}
        if parent_run is not None:
            tags[PARENT_TAG] = parent_run
        given = {"name": self.run_name(stage), "model": model, "tags": tags}
        for part in ("tracking", "storage"):
            given[part] = getattr(config, part).model_dump(mode="json", exclude_unset=True)
        return merge_layers(kind, [("shared", config.shared), *layers, ("the recipe", given)]).config


def _misplaced(where: str, fields: Mapping[str, Any], elsewhere: Mapping[str, str]) -> list[str]:
    return [f"{where}.{name}: is said by {elsewhere[name]}" for name in fields if name in elsewhere]


def load_recipe(path: Path, overrides: list[str]) -> RecipeConfig:
    """Read a recipe's file, with FIELD=VALUE over it; what it names in this folder is made absolute.

    Raises:
        ConfigErrors: one line per problem.
    """
    tree = read_tree(path, "a recipe")
    for override in overrides:
        field, value = parse_override(override)
        merge_into(tree, nest(field, value), "command line", {})
    try:
        return located(RecipeConfig.model_validate(tree))
    except ValidationError as error:
        raise ConfigErrors(describe(error)) from None


def located(config: RecipeConfig) -> RecipeConfig:
    """`config` with paths of this machine made absolute: a worker or a resume in another folder reads the same files."""
    data = _located(json.loads(config.model_dump_json(exclude_unset=True)))
    for tree, field in ((data, "model"), *((domain, "specialist") for domain in data["domains"].values())):
        if tree.get(field) and Path(tree[field]).exists():
            tree[field] = str(Path(tree[field]).resolve())
    if config.storage.uri is not None and not config.storage.uri.startswith("file:") and not config.storage.remote:
        data["storage"]["uri"] = str(config.storage.folder())
    return RecipeConfig.model_validate(data)


def _located(value: Any, field: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _located(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_located(item) for item in value]
    if not isinstance(value, str):
        return value
    code = _PYTHON.match(value)
    if code and Path(code[1]).is_file():
        return f"{Path(code[1]).resolve()}:{code[2]}"
    return str(Path(value).resolve()) if field == "path" and Path(value).exists() else value
