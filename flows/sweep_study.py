"""Optuna's part of a sweep: which values a trial gets, and whether it is worth going on with.

    ask(n) ─▶ values ─▶ (the trial runs) ─▶ report(n, step, value) … ─▶ tell(n, …)

The study is the sampler's memory, in the registry's database; what became of a trial is the registry's row (`sweep_trials`).
Every method may be called again after a kill in its middle: an Optuna trial carries the number of the sweep's trial it stands
for once its values are drawn, and one that does not was never used. Each draw has a seed of its own, made of the sweep's and
the trial's number, so that a sweep that was killed draws what it would have drawn.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from flows.sweep_config import Dimension, SweepConfig
from flows.sweep_space import Params
from infra.registry_engine import BUSY_TIMEOUT_S

NUMBER = "loopwright.trial"
MIN_FOR_IMPORTANCE = 4
_STATES = {"FINISHED": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED, "FAILED": TrialState.FAIL}


@contextmanager
def open_storage(url: str) -> Iterator[BaseStorage]:
    """Optuna's tables in the database of the registry; made if they are not there."""
    # Other processes write to the same SQLite file: wait for them as long as the registry does.
    options = {"connect_args": {"timeout": BUSY_TIMEOUT_S}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    storage = RDBStorage(url, engine_kwargs=options)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


class Study:
    """The Optuna study of one sweep; `config.name` is its name."""

    def __init__(self, config: SweepConfig, storage: BaseStorage, max_steps: int = -1) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config = config
        self._distributions = {name: _distribution(dimension) for name, dimension in config.space.items()}
        self._study = optuna.create_study(
            storage=storage,
            study_name=config.name,
            direction="minimize" if config.minimizes else "maximize",
            pruner=_pruner(config, max_steps),
            load_if_exists=True,
        )
        self._ids: dict[int, int] = {}
        for trial in self._trials():
            if NUMBER in trial.user_attrs:
                self._ids[trial.user_attrs[NUMBER]] = trial._trial_id  # a later one of the same number wins

    def ask(self, number: int, values: Params | None = None, draw: int = 0) -> Params:
        """Values for trial `number`: `values` if given, else drawn. `draw` counts those of this trial that were no good."""
        sampler = self._sampler(number, draw)
        if values is not None:
            fixed = {name: _encode(self.config.space[name], value) for name, value in values.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                sampler = optuna.samplers.PartialFixedSampler(fixed, sampler)
        self._study.sampler = sampler
        trial = self._study.ask(self._distributions)
        trial.set_user_attr(NUMBER, number)
        self._ids[number] = trial._trial_id
        return {name: _decode(self.config.space[name], value) for name, value in trial.params.items()}

    def take_up(self, number: int, values: Params) -> None:
        """Make sure that an unfinished trial of these values stands for `number`."""
        if number not in self._ids or self._frozen(number).state.is_finished():
            self.ask(number, values)

    def report(self, number: int, points: Iterable[tuple[int, float]], compare: bool = True) -> int | None:
        """Tell values by step; the step at which the trial should be stopped, if it should and is compared."""
        if self.config.pruning.type == "none":
            return None
        trial, last = Trial(self._study, self._ids[number]), self._frozen(number).last_step
        for step, value in points:
            if last is not None and step <= last:
                continue
            trial.report(value, step)
            if trial.should_prune() and compare:  # asked in any case: hyperband notes then who has come how far
                return step
        return None

    def last_step(self, number: int) -> int:
        """Newest step that was reported; 0: none."""
        return (self._frozen(number).last_step or 0) if number in self._ids else 0

    def tell(self, number: int, status: str, value: float | None = None) -> None:
        """The end of a trial: FINISHED with its value, PRUNED or FAILED. Told again, nothing changes."""
        if number in self._ids and not self._frozen(number).state.is_finished():
            values = value if status == "FINISHED" else None
            self._study.tell(Trial(self._study, self._ids[number]), values, _STATES[status])

    def drop_unused(self, used: Iterable[int]) -> None:
        """Trials that were drawn for no row of the registry (the sweep was killed in between) do not count."""
        known = {self._ids[number] for number in used if number in self._ids}
        for trial in self._trials():
            if not trial.state.is_finished() and trial._trial_id not in known:
                self._study.tell(trial.number, state=TrialState.FAIL)

    def importance(self) -> dict[str, float]:
        """Share of each field in how much the trials' values differ, largest first; {} when there are too few to say."""
        done = [trial for trial in self._trials() if trial.state == TrialState.COMPLETE]
        if len(done) < MIN_FOR_IMPORTANCE or len({trial.value for trial in done}) == 1:
            return {}
        varied = [name for name in self.config.space if len({trial.params[name] for trial in done}) > 1]
        if not varied:
            return {}
        return dict(optuna.importance.get_param_importances(self._study, params=varied))

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study._storage.get_trial(self._ids[number])

    def _sampler(self, number: int, draw: int) -> optuna.samplers.BaseSampler:
        seed = (self.config.seed * 1_000_003 + number * 1_009 + draw) % 2**32
        if self.config.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(2, self.config.trial_count // 3)))
        return optuna.samplers.RandomSampler(seed=seed)


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.values is not None:
        return CategoricalDistribution([_encode(dimension, value) for value in dimension.values])
    low, high = dimension.bounds()
    if dimension.int:
        return IntDistribution(low, high, log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(low, high, log=dimension.log, step=dimension.step)


def _plain(values: list[Any]) -> bool:
    """Whether Optuna can tell the values apart as they are: it takes no lists, and 1 and true are one to it."""
    return all(isinstance(value, str) for value in values) or all(type(value) in (int, float) for value in values)


def _encode(dimension: Dimension, value: Any) -> Any:
    if dimension.values is None or _plain(dimension.values):
        return value
    return json.dumps(value, sort_keys=True)


def _decode(dimension: Dimension, value: Any) -> Any:
    if dimension.values is None:
        return value
    return next(one for one in dimension.values if _encode(dimension, one) == value)


def _pruner(config: SweepConfig, max_steps: int) -> optuna.pruners.BasePruner:
    pruning = config.pruning
    if pruning.type == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=pruning.startup_trials, n_warmup_steps=pruning.warmup_steps)
    if pruning.type == "hyperband":
        return optuna.pruners.HyperbandPruner(
            min_resource=max(1, pruning.warmup_steps),
            max_resource=max_steps if max_steps > 0 else "auto",
            reduction_factor=pruning.reduction_factor,
        )
    return optuna.pruners.NopPruner()
