"""From a sweep config to the run config of every trial, all of them checked before the first one starts.

    base (environment ▸ base_file ▸ base) ─┐
    parameters of trial n ─────────────────┼─▶ merge_layers ─▶ run config of trial n, named <sweep>-t<n>
    what all trials share ─────────────────┘

Pure: no Optuna, no database. A grid's trials are known beforehand and each is built; of drawn trials every value and bound is.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.config import GeneratingRunConfig, RunConfig, absolute_paths
from flows.config_file import ConfigErrors, file_layers, merge_into, merge_layers, nest
from flows.sweep_config import ACCURACY, WATCHED_ACCURACY, SweepConfig
from infra.tracking_tags import PARENT_TAG
from trainers.config import SECTIONS

MAX_GRID = 10_000
_CHECKED_COMBINATIONS = 512
_SHOWN = 5

# What the sweep itself gives every trial, or all trials share.
NOT_IN_SPACE = {
    "name": "every trial gets one of its own",
    "type": "`kind` says it for all trials",
    "sweep": "the sweep fills it in",
    "tags": "set them in `base`",
    "tracking": "trials that are compared are tracked in one place",
    "storage": "`storage` of the sweep is for all trials",
}
Params = dict[str, Any]


def trial_name(sweep: str, number: int) -> str:
    """The run's name."""
    return f"{sweep}-t{number}"


def label(params: Mapping[str, Any]) -> str:
    """`learning_rate=0.001, num_generations=8`."""
    return ", ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in params.items())


def field_path(name: str) -> tuple[str, ...]:
    """A dotted name as the path in a config: `optim.learning_rate` is the field `learning_rate`."""
    first, *rest = name.split(".")
    if rest and rest[0] in SECTIONS.get(first, ()):
        return tuple(rest)
    return (first, *rest)


class Plan:
    """What the trials of one sweep are. `config.name` is set; `config.base` is whole (`inlined`).

    Raises:
        ConfigErrors: one line per problem, naming the trial that is bad.
    """

    def __init__(self, config: SweepConfig) -> None:
        self.config = config
        self._check_space()

    def trial_config(self, number: int, params: Params, parent_run: str | None = None) -> RunConfig:
        """The run config of a trial; `parent_run`: the sweep's MLflow run, if it is known.

        Raises:
            ConfigErrors: these values make no valid config.
        """
        name = str(self.config.name)
        source = f"trial {number} ({label(params)})"
        tags = {"loopwright.sweep": name, "loopwright.trial": str(number)}
        if parent_run is not None:
            tags[PARENT_TAG] = parent_run
        given = {"name": trial_name(name, number), "tags": tags, "sweep": self._trial_of(number)}
        # A value replaces what the base has in its place, also where both are mappings.
        base = _without(self.config.base, self.config.space)
        layers = [("base", base), *((source, nest(field_path(key), value)) for key, value in params.items())]
        config = merge_layers(self.config.kind, [*layers, ("the sweep", given)]).config
        self._check_trial(config)
        return config

    def grid(self) -> list[Params]:
        """Every combination once, in the order of the trials."""
        combinations = list(self._combinations())
        random.Random(self.config.seed).shuffle(combinations)
        return combinations[: self.config.trial_count]

    def check(self) -> None:
        """Build every trial's config that is known now.

        Raises:
            ConfigErrors: with the trials or values that are bad, at most a few of them.
        """
        trials = self.grid() if self.config.sampler == "grid" else list(self._samples())
        bad: list[str] = []
        for number, params in enumerate(trials):
            try:
                self.trial_config(number, params)
            except ConfigErrors as error:
                if all(line.startswith("base: ") for line in error.lines):
                    raise
                source = f"trial {number} ({label(params)}): "
                bad += [line if line.startswith(source) else f"{source}{line}" for line in error.lines]
        if bad:
            more = [f"and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
            raise ConfigErrors([*bad[:_SHOWN], *more])

    def _check_space(self) -> None:
        lines, seen = [], {}
        for name in self.config.space:
            path = field_path(name)
            if path in seen:
                lines.append(f"space.{name}: is the field that space.{seen[path]} names already")
            seen[path] = name
            if path[0] in NOT_IN_SPACE:
                lines.append(f"space.{name}: cannot vary: {NOT_IN_SPACE[path[0]]}")
        if self.config.sampler == "grid" and self.config.grid_size > MAX_GRID:
            size = self.config.grid_size
            lines.append(f"space: the grid has {size} combinations, at most {MAX_GRID} are taken: sample it (sampler=random)")
        if lines:
            raise ConfigErrors(lines)

    def _check_trial(self, config: RunConfig) -> None:
        """What is right for a run alone, and not for trials that are compared."""
        if self.config.metric == ACCURACY and config.eval is None:
            raise ConfigErrors(
                ["base: metric=accuracy is measured on a held-out set: give base.eval.dataset, or choose another metric"]
            )
        evaluates = config.eval is not None and config.eval.every > 0
        if self.config.watched == WATCHED_ACCURACY and self.config.pruning.type != "none" and not evaluates:
            raise ConfigErrors(
                ["base: pruning by accuracy compares evaluations during training: set base.eval.every to the steps between two"]
            )
        given = isinstance(config, GeneratingRunConfig) and config.servers.student.urls
        if given and self.config.parallel > 1 and ("servers", "student", "url") not in map(field_path, self.config.space):
            text = "trials at the same time would send their weights to the same server: write parallel=1, or leave the url out"
            raise ConfigErrors([f"base: servers.student.url: {text}, so that each trial starts its own"])

    def _trial_of(self, number: int) -> dict[str, Any]:
        config = self.config
        return {
            "name": config.name,
            "trial": number,
            "watch": config.watched,
            "average_steps": config.averaged_steps,
            "every_steps": config.pruning.every_steps,
        }

    def _combinations(self) -> Iterator[Params]:
        names = list(self.config.space)
        for values in itertools.product(*(dimension.points() or () for dimension in self.config.space.values())):
            yield dict(zip(names, values, strict=True))

    def _samples(self) -> Iterator[Params]:
        """All combinations if they are few; else every value and bound of each field, with the others at their first."""
        if (
            all(dimension.points() for dimension in self.config.space.values())
            and self.config.grid_size <= _CHECKED_COMBINATIONS
        ):
            yield from self._combinations()
            return
        first = self.config.first_values
        yield first
        for name, dimension in self.config.space.items():
            values = dimension.known()
            tried = values[1:] if len(values) <= _CHECKED_COMBINATIONS else [values[-1]]
            yield from ({**first, name: value} for value in tried)


def inlined(config: SweepConfig, with_environment: bool) -> SweepConfig:
    """`config` with all that the trials begin from in `base`: what a resume needs is in one place, and paths are absolute.

    `with_environment`: LOOPWRIGHT_… variables are the lowest layer, as for `loopwright run`. Doing it again changes nothing.

    Raises:
        ConfigErrors: the base, or the first value of a field, is no valid config.
    """
    shared = {
        name: part.model_dump(mode="json", exclude_unset=True)
        for name in ("tracking", "storage")
        if (part := getattr(config, name))
    }
    path = None if config.base_file is None else Path(config.base_file)
    layers = file_layers(config.kind, path) if with_environment else file_layers(config.kind, path, {})
    layers = [
        (source, {name: value for name, value in tree.items() if name not in ("name", "sweep")}) for source, tree in layers
    ]
    Plan(config)  # before names of the space are looked up in a config
    space = [(f"space.{name}", nest(field_path(name), value)) for name, value in config.first_values.items()]
    layers = [*layers, ("base", config.base), ("the sweep", shared)]
    try:
        merged = merge_layers(config.kind, [*layers, *space]).config
    except ConfigErrors:
        base: dict[str, Any] = {}
        for source, tree in layers:
            merge_into(base, tree, source, {})
        Plan(config.model_copy(update={"name": "sweep", "base": base})).check()  # says which trials are bad
        raise
    whole = absolute_paths(merged).model_dump(mode="json", exclude_unset=True)
    return config.model_copy(update={"base_file": None, "base": _without(whole, [*config.space, "name", "sweep", "type"])})


def _without(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A copy without these fields, nor groups that have no other. Items of lists stay: the others would get other numbers."""
    copy = json.loads(json.dumps(tree))
    for name in names:
        _drop(copy, field_path(name))
    return copy


def _drop(tree: Any, path: tuple[str, ...]) -> None:
    first, *rest = path
    if not isinstance(tree, dict) or first not in tree:
        return
    if rest:
        _drop(tree[first], tuple(rest))
    if not rest or tree[first] == {}:
        del tree[first]


def checked(config: SweepConfig, with_environment: bool = False) -> Plan:
    """The plan of a sweep whose every trial is valid; `config.name` is set.

    Raises:
        ConfigErrors: something is not.
    """
    plan = Plan(inlined(config, with_environment))
    plan.check()
    return plan
