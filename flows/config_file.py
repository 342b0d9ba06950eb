"""A run config from its sources, with the source of every value kept.

    environment LOOPWRIGHT_A__B ─▶ preset ─▶ file (YAML or JSON) ─▶ command line a.b=value

A later one wins; mappings are merged.

Values of overrides and variables are read as YAML, in Hydra's manner: `num_generations=16`, `optim.learning_rate=1e-4`,
`servers.student.extra_args='["--x"]'`, `reward_funcs.0.kwargs.pattern=…`. References (`${oc.env:NAME}`) stay as written.
"""

from __future__ import annotations

import difflib
import json
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from flows.config import RUN_CONFIGS, RunConfig
from flows.presets import find_preset
from flows.yaml_text import parse_yaml
from trainers.config import SECTIONS, StrictModel
from trainers.errors import ConfigError
from trainers.references import is_reference, problems

PREFIX = "LOOPWRIGHT_"
# Variables of Loopwright that are no config fields.
RESERVED = {"HOME", "LEASE", "NOTIFY_URL", "REGISTRY_URL", "ROLLOUT_PROCESS", "WEIGHT_DIRS"}


class ConfigErrors(ConfigError):
    """Everything that is wrong with a config, one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


@dataclass
class LoadedConfig:
    """A valid config and where its values came from: `origins` maps the dotted names of set leaves to their source."""

    config: RunConfig
    origins: dict[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted name, value, source) of every field, defaults included."""
        yield from ((name, value, self.origin(name)) for name, value in leaves(self.config.model_dump(mode="json")))

    def origin(self, name: str) -> str:
        return _origin(self.origins, name) or "default"


def load_config(
    kind: str,
    path: Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    preset: str | None = None,
) -> LoadedConfig:
    """Read, merge and validate a run config of algorithm `kind` (`grpo`, `sft`).

    Raises:
        ConfigErrors: with one line per problem, each naming the file, override or variable it comes from.
        ConfigError: there is no such preset of this kind.
    """
    cls = RUN_CONFIGS[kind]
    lines: list[str] = []
    start = [] if preset is None else [(f"preset {preset}", dict(find_preset(preset, kind).fields))]
    layers = [*_environment(cls, environ, lines), *start, *_file(path, lines), *_command_line(overrides, lines)]
    return merge_layers(kind, layers, environ, lines)


def file_layers(kind: str, path: Path | None, environ: Mapping[str, str] = os.environ) -> list[tuple[str, dict[str, Any]]]:
    """(source, tree) of what the environment and a file say about a run config, for `merge_layers`; the later wins.

    Raises:
        ConfigErrors: the file cannot be read, or a variable names no field.
    """
    lines: list[str] = []
    layers = [*_environment(RUN_CONFIGS[kind], environ, lines), *_file(path, lines)]
    if lines:
        raise ConfigErrors(lines)
    return layers


def override_layers(overrides: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """(source, tree) of each `field=value`, for `merge_layers`.

    Raises:
        ConfigErrors: one is not of this form.
    """
    lines: list[str] = []
    layers = list(_command_line(overrides, lines))
    if lines:
        raise ConfigErrors(lines)
    return layers


def merge_layers(
    kind: str,
    layers: Sequence[tuple[str, Mapping[str, Any]]],
    environ: Mapping[str, str] = os.environ,
    problems_so_far: Sequence[str] = (),
) -> LoadedConfig:
    """The config that `layers` (source, tree of fields) make, a later one winning.

    Raises:
        ConfigErrors: `problems_so_far` and one line per problem found here.
    """
    cls, lines = RUN_CONFIGS[kind], list(problems_so_far)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, tree in layers:
        tree = _flatten_sections(dict(tree))
        lines.extend(f"{source}: {reason}" for reason in _refusals(cls, tree))
        merge_into(merged, tree, source, origins)
    for name, value in leaves(merged):
        if isinstance(value, str):
            lines.extend(f"{_origin(origins, name)}: {name}: {problem}" for problem in problems(value, environ))
    if not lines:
        try:
            return LoadedConfig(cls.model_validate(merged), origins)
        except ValidationError as error:
            lines = describe(error, origins)
    raise ConfigErrors(lines)


def describe(error: ValidationError, origins: Mapping[str, str] | None = None) -> list[str]:
    """A pydantic error as one plain line per problem: source, field, what is wrong, the value."""
    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            message = "is required and not set"
        elif not isinstance(problem["input"], dict | BaseModel):
            shown = problem["input"]
            message += f" (got {shown!r})"
            if is_reference(shown):
                message += "; a reference stands for text only"
        source = _origin(origins or {}, name)
        prefix = "" if source is None else f"{source}: "
        lines.append(f"{prefix}{name}: {message}" if name else f"{prefix}{message}")
    return lines


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree of dictionaries and lists of dictionaries; other lists count as values."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{prefix}.{index}")
    else:
        yield prefix, tree


def _file(path: Path | None, lines: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if path is None:
        return
    try:
        tree = read_tree(path, "a config")
    except ConfigErrors as error:
        lines.extend(error.lines)
    else:
        yield str(path), tree


def read_tree(path: Path, what: str) -> dict[str, Any]:
    """The mapping of fields to values in a YAML or JSON file, {} in an empty one; `what` it should be, for the message.

    Raises:
        ConfigErrors: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text, object_pairs_hook=_each_once) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise ConfigErrors([f"{path}: cannot be read: {error.strerror}"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigErrors([f"{path}: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict | None):
        raise ConfigErrors([f"{path}: {what} is a mapping of fields to values, this is a {type(tree).__name__}"])
    return tree or {}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file. Raises `ValueError` for a key that is written twice, as `parse_yaml` does."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key `{next(name for name in names if names.count(name) > 1)}` is written twice")
    return tree


def _command_line(overrides: Sequence[str], lines: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for override in overrides:
        try:
            path, value = parse_override(override)
        except ConfigErrors as error:
            lines.extend(error.lines)
        else:
            yield f"command line `{override}`", nest(path, value)


def parse_override(override: str) -> tuple[list[str], Any]:
    """`a.b=1` → `["a", "b"]`, 1.

    Raises:
        ConfigErrors: it is not of this form.
    """
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigErrors([f"command line: `{override}` is not of the form field=value"])
    try:
        return path, parse_yaml(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigErrors([f"command line: `{override}`: {' '.join(str(error).split())}"]) from None


def _environment(cls: type[StrictModel], environ: Mapping[str, str], lines: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    known = {name for config in RUN_CONFIGS.values() for name in config.model_fields} | set(SECTIONS)
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in RESERVED:
            continue
        path = variable.removeprefix(PREFIX).lower().split("__")
        if path[0] not in known:
            near = difflib.get_close_matches(path[0], known, n=1)
            hint = f": did you mean {PREFIX}{near[0].upper()}?" if near else ""
            lines.append(f"environment {variable}: unknown field `{path[0]}`{hint}")
        elif path[0] in cls.model_fields or path[0] in SECTIONS:  # a field of another algorithm is not for this run
            try:
                yield f"environment {variable}", nest(path, parse_yaml(environ[variable]))
            except yaml.YAMLError as error:
                lines.append(f"environment {variable}: {' '.join(str(error).split())}")


def nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    """`["a", "b"]`, 1 → `{"a": {"b": 1}}`."""
    for name in reversed(path):
        value = {name: value}
    return value


def _flatten_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """`optim: {learning_rate: …}` as the fields themselves, so that both ways of writing override one another."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if name in SECTIONS and isinstance(value, dict):
            known = {key: item for key, item in value.items() if key in SECTIONS[name]}
            flat.update(known)
            if len(known) < len(value):
                flat[name] = {key: item for key, item in value.items() if key not in known}
        else:
            flat[name] = value
    return flat


def _refusals(cls: type[StrictModel], tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Why names in `tree` may not be set, walking into nested models."""
    for name, value in tree.items():
        if name in SECTIONS and isinstance(value, dict):
            for key in value:
                near = difflib.get_close_matches(str(key), SECTIONS[name], n=1)
                hint = f"did you mean `{name}.{near[0]}`?" if near else f"{name} has {', '.join(SECTIONS[name])}"
                yield f"unknown field `{name}.{key}`: {hint}"
            continue
        reason = cls.refusal(str(name))
        if reason:
            yield reason if not prefix else f"{prefix}: {reason}"
            continue
        here = f"{prefix}.{name}" if prefix else str(name)
        annotation = cls.model_fields[name].annotation
        inner = _model_in(annotation)
        if inner is None:
            continue
        if isinstance(value, list):
            items = {str(index): item for index, item in enumerate(value)}
        elif typing.get_origin(annotation) is dict and isinstance(value, dict):  # models by name
            items = value
        else:
            items = value if _index_keys(value) else {"": value}
        for index, item in items.items():
            if isinstance(item, dict):
                yield from _refusals(inner, item, f"{here}.{index}" if index else here)


def _model_in(annotation: Any) -> type[StrictModel] | None:
    """The model that a field's annotation holds, through optional, list and mapping."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    return next(filter(None, (_model_in(arg) for arg in typing.get_args(annotation))), None)


def _index_keys(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(str(key).isdigit() for key in value)


def merge_into(into: dict[str, Any], tree: Mapping[str, Any], source: str, origins: dict[str, str], prefix: str = "") -> None:
    """Merge `tree` into `into` in place: mappings key by key, numbered keys into an existing list, anything else replaced."""
    for name, value in tree.items():
        here = f"{prefix}.{name}" if prefix else str(name)
        old = into.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            merge_into(old, value, source, origins, here)
        elif isinstance(old, list) and _index_keys(value):
            items: dict[str, Any] = {str(index): item for index, item in enumerate(old)}
            merge_into(items, value, source, origins, here)
            into[name] = [items[key] for key in sorted(items, key=int)]
        else:
            for stale in [key for key in origins if key == here or key.startswith(f"{here}.")]:
                del origins[stale]
            into[name] = json.loads(json.dumps(value)) if isinstance(value, dict | list) else value
            origins.update({leaf: source for leaf, _ in leaves(value, here)})


def _origin(origins: Mapping[str, str], name: str) -> str | None:
    """Source of a leaf, of the list or mapping it lies in, or of what lies in it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = origins.get(".".join(parts[:end]))
        if found:
            return found
    return next((source for leaf, source in origins.items() if name and leaf.startswith(f"{name}.")), None)
