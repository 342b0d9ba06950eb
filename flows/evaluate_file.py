"""An evaluation's config from a file and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.config_file import ConfigErrors, describe, merge_into, override_layers, read_tree
from flows.evaluate_config import EvaluateConfig


def load_evaluation(path: Path | None, overrides: Sequence[str] = ()) -> EvaluateConfig:
    """A file (YAML or JSON), with FIELD=VALUE over it.

    Raises:
        ConfigErrors: one line per problem.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = list(override_layers(overrides))
    if path is not None:
        content = read_tree(path, "an evaluation")
        layers.insert(0, (str(path), content))
    for source, layer in layers:
        merge_into(tree, dict(layer), source, origins)
    try:
        config = EvaluateConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigErrors(describe(error, origins)) from None
    return _absolute(config)


def _absolute(config: EvaluateConfig) -> EvaluateConfig:
    """Paths of files that are there, made absolute: a worker reads them from another folder."""
    data = config.model_dump(mode="json", exclude_unset=True)
    if config.model is not None and Path(config.model).exists():
        data["model"] = str(Path(config.model).resolve())
    if config.dataset is not None and Path(config.dataset.path).exists():
        data["dataset"]["path"] = str(Path(config.dataset.path).resolve())
    if config.reward_func is not None:
        file, colon, attribute = config.reward_func.path.rpartition(":")
        if colon and file.endswith(".py"):
            data["reward_func"]["path"] = f"{Path(file).resolve()}:{attribute}"
    return EvaluateConfig.model_validate(data)
