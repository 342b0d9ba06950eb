"""A sweep config from a file and the command line: `loopwright sweep run FILE [FIELD=VALUE]…`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.config import RUN_CONFIGS
from flows.config_file import ConfigErrors, describe, merge_into, nest, parse_override, read_tree
from flows.sweep_config import Dimension, SweepConfig


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file, with FIELD=VALUE over it. `base_file` is relative to the sweep file.

    Raises:
        ConfigErrors: one line per problem.
    """
    tree = _read(path)
    for override in overrides:
        _override(tree, *parse_override(override))
    return sweep_config(tree, path.parent)


def sweep_config(tree: dict[str, Any], folder: Path | None = None) -> SweepConfig:
    """A validated sweep config; `folder`: what a relative `base_file` is relative to.

    Raises:
        ConfigErrors: one line per problem.
    """
    try:
        config = SweepConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigErrors(describe(error)) from None
    if config.base_file is not None and folder is not None:
        config = config.model_copy(update={"base_file": str((folder / Path(config.base_file).expanduser()).resolve())})
    return config


def _read(path: Path) -> dict[str, Any]:
    tree = read_tree(path, "a sweep")
    if "space" not in tree and {*RUN_CONFIGS["sft"].model_fields} - {*SweepConfig.model_fields} & {*tree}:
        raise ConfigErrors([f"{path}: this looks like a run config: a sweep names it in `base_file`, and has a `space`"])
    return tree


def _override(tree: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set one field in place. Names of the space's fields have dots of their own: `space.eval.every.values`."""
    if parts[0] != "space" or len(parts) < 2:
        merge_into(tree, nest(parts, value), "command line", {})
        return
    attribute = parts.pop() if len(parts) > 2 and parts[-1] in Dimension.model_fields else None
    name, space = ".".join(parts[1:]), dict(tree.get("space") or {})
    old = space.get(name)
    # Values instead of a range, or the other way round, replace what was there; a range's parts are set one by one.
    kept = old if isinstance(old, dict) and "values" not in old and attribute != "values" else {}
    space[name] = {**kept, attribute: value} if attribute else value
    tree["space"] = space
