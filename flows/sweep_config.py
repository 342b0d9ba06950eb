"""The sweep config: a run config to begin from, what varies, how values are chosen, and what a trial is judged by.

sweep file, command line ─▶ flows.sweep_file ─▶ SweepConfig ─▶ flows.sweep_space.Plan: every trial's run config, checked
"""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from flows.config import ParentRetry, StorageConfig, TrackingConfig
from trainers.config import StrictModel
from trainers.metrics import CATALOG, spec_of

ACCURACY = "accuracy"
WATCHED_ACCURACY = "eval/accuracy"  # what accuracy is called while a run trains
# A trial's folder and its models have its name, so the sweep's leaves room for the number.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]|\{date\})*\Z")
_NAME_CHARS = 100
_AVERAGE_STEPS = 10


class Dimension(StrictModel):
    """What one field is given: some values, or a range from `low` to `high`. A list alone is its `values`."""

    values: list[Any] | None = Field(default=None, description="The values to choose from. Default none: a range.")
    low: float | None = Field(default=None, description="Smallest value of a range. Default none: `values`.")
    high: float | None = Field(default=None, description="Largest value of a range. Default none: `values`.")
    log: bool = Field(default=False, description="Draw from the range evenly in the logarithm. Default false.")
    step: float | None = Field(
        default=None, gt=0, description="Distance between two values of a range. Default: 1 with `int`, else any value between."
    )
    int: bool = Field(default=False, description="The range's values are whole numbers. Default false.")

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, data: Any) -> Any:
        return {"values": data} if isinstance(data, list) else data

    @model_validator(mode="after")
    def _values_or_range(self) -> Dimension:
        parts = {name: getattr(self, name) for name in ("low", "high", "log", "step", "int")}
        ranged = [name for name, part in parts.items() if part is not None and part is not False]
        if self.values is not None:
            if ranged:
                raise ValueError(f"has `values` and {', '.join(ranged)}: write values, or a range from low to high")
            self._check_values(self.values)
        elif self.low is None or self.high is None:
            raise ValueError("write `values: […]`, or a range by `low` and `high`")
        else:
            self._check_range(self.low, self.high)
        return self

    def _check_values(self, values: list[Any]) -> None:
        if not values:
            raise ValueError("values is empty: name at least one")
        texts = [json.dumps(value, sort_keys=True) for value in values]
        if twice := [text for text in texts if texts.count(text) > 1]:
            raise ValueError(f"values names {twice[0]} twice: name every value once")

    def _check_range(self, low: float, high: float) -> None:
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"low={low:g} is not below high={high:g}")
        if self.log and low <= 0:
            raise ValueError(f"low={low:g} has no logarithm: write a low above 0, or leave `log` out")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude one another: leave one out")
        if self.int and any(part is not None and part != int(part) for part in (low, high, self.step)):
            raise ValueError("a range of whole numbers has whole low, high and step")
        if self.step is not None and abs((high - low) / self.step - round((high - low) / self.step)) > 1e-9:
            last = low + self.step * math.floor((high - low) / self.step)
            raise ValueError(f"high={high:g} is no whole number of steps above low: write high={last:g}, or another step")

    def points(self) -> list[Any] | None:
        """Every value it can take; None: a range without steps has no end of them."""
        if self.values is not None:
            return self.values
        assert self.low is not None and self.high is not None
        step = self.step or (1.0 if self.int and not self.log else None)
        if step is None:
            return None
        count = round((self.high - self.low) / step) + 1
        # Rounded as Optuna does it: 0.1 + 2 * 0.1 is 0.3 to whoever reads the table.
        return [self._number(round(self.low + index * step, 12)) for index in range(count)]

    def bounds(self) -> tuple[Any, Any]:
        assert self.low is not None and self.high is not None
        return self._number(self.low), self._number(self.high)

    def known(self) -> list[Any]:
        """What can be tried beforehand: every value, of a range without steps its bounds."""
        return self.points() or list(self.bounds())

    def _number(self, value: float) -> Any:
        return int(value) if self.int else value


class PruningConfig(StrictModel):
    """Stopping trials that do worse than others did at the same step. A name alone is its `type`."""

    type: Literal["none", "median", "hyperband"] = Field(
        default="none",
        description="median: stop what is worse than the median of finished trials; hyperband: several races, each keeping "
        "one of `reduction_factor`. Default none.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps before a trial can be stopped. Default 0.")
    every_steps: int = Field(default=1, ge=1, description="Optimizer steps between two comparisons. Default 1.")
    startup_trials: int = Field(default=5, ge=0, description="median: trials that finish before any is stopped. Default 5.")
    reduction_factor: int = Field(default=3, ge=2, description="hyperband: of this many trials one goes on. Default 3.")

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, data: Any) -> Any:
        return {"type": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _fields_of_the_type(self) -> PruningConfig:
        for name, kind in (("startup_trials", "median"), ("reduction_factor", "hyperband")):
            # Not whether it was written: a stored config has every field.
            if getattr(self, name) != PruningConfig.model_fields[name].default and self.type not in (kind, "none"):
                raise ValueError(f"{name} is of {kind} pruning, this is {self.type}: leave it out")
        return self


class SweepLimits(StrictModel):
    """What a sweep may use."""

    wall_clock_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds one flow run of the sweep may take; then its trials checkpoint and stop, and it can be resumed. "
        "Default none.",
    )
    failed_trials: int = Field(
        default=5, ge=1, description="Failed trials in a row after which the sweep gives up; it can be resumed. Default 5."
    )


class SweepConfig(StrictModel):
    """A sweep: everything about its trials."""

    name: str | None = Field(
        default=None,
        description="Name of the sweep, unique; the same name again resumes; `{date}` in it is the day the flow run was due. "
        "Default: made up.",
    )
    kind: Literal["grpo", "distillation", "sft"] = Field(description="Which run configs the trials have.")
    base_file: str | None = Field(default=None, description="Run config (YAML, JSON) the trials begin from. Default none.")
    base: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the trials' run config, over those of `base_file`. Default none."
    )
    space: dict[str, Dimension] = Field(
        min_length=1, description="What varies: dotted names of run config fields, each with values or a range."
    )
    sampler: Literal["grid", "random", "tpe"] = Field(
        default="tpe",
        description="grid: every combination once, in an order drawn from `seed`; random: drawn independently; tpe: drawn from "
        "what did well so far. Default tpe.",
    )
    trials: int | None = Field(default=None, ge=1, description="Trials in all. grid: default the whole grid; else required.")
    parallel: int = Field(default=1, ge=1, description="Trials at the same time, as far as GPUs are free. Default 1.")
    metric: str = Field(
        default=ACCURACY,
        description="What a trial is judged by: `accuracy` on the held-out set (`base.eval`) after training, or a metric of "
        "docs/metrics.md at its end. Default accuracy.",
    )
    direction: Literal["maximize", "minimize"] | None = Field(
        default=None, description="Whether more or less of the metric is better. Default: minimize `loss`, maximize all others."
    )
    average_steps: int | None = Field(
        default=None,
        ge=1,
        description="Newest values of the metric whose mean counts. Default 10; 1 for accuracy, which is logged rarely.",
    )
    pruning: PruningConfig = Field(default_factory=PruningConfig, description="Stopping trials early.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of all that is drawn; the trials' own is in `base`. Default 0.")
    tracking: TrackingConfig | None = Field(default=None, description="MLflow, of sweep and trials. Default: `base`'s.")
    storage: StorageConfig | None = Field(default=None, description="Checkpoints of the trials. Default: `base`'s.")
    retry: ParentRetry = Field(default_factory=ParentRetry, description="Trials that were lost, and the sweep itself.")
    limits: SweepLimits = Field(default_factory=SweepLimits, description="Limits of the sweep.")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        if name is not None and not (_NAME.match(name) and len(name) <= _NAME_CHARS):
            raise ValueError(
                "a sweep's name has letters, digits, `_`, `-`, `.` and `{date}`, starts with a letter or digit, and has at "
                f"most {_NAME_CHARS} characters"
            )
        return name

    @model_validator(mode="after")
    def _known_metric(self) -> SweepConfig:
        if self.metric == ACCURACY:
            return self
        try:
            spec = spec_of(self.metric)
        except KeyError:
            near = difflib.get_close_matches(self.metric, [ACCURACY, *CATALOG], n=1)
            hint = f"did you mean `{near[0]}`?" if near else "docs/metrics.md lists them"
            raise ValueError(f"metric: there is no metric `{self.metric}`: {hint}") from None
        if self.kind not in spec.algorithms:
            raise ValueError(f"metric: {self.kind} has no `{self.metric}`: it is a metric of {', '.join(spec.algorithms)}")
        return self

    @model_validator(mode="after")
    def _known_trials(self) -> SweepConfig:
        if self.sampler != "grid":
            if self.trials is None:
                raise ValueError(f"trials: is required with sampler={self.sampler}, which has no end of its own")
            return self
        for name, dimension in self.space.items():
            if dimension.points() is None:
                raise ValueError(f"space.{name}: a grid has values: add a `step` to the range, or write `values: […]`")
        if self.trials is not None and self.trials > self.grid_size:
            raise ValueError(f"trials: the grid has {self.grid_size} combinations, so {self.trials} trials are too many")
        return self

    @property
    def grid_size(self) -> int:
        return math.prod(len(dimension.points() or ()) for dimension in self.space.values())

    @property
    def trial_count(self) -> int:
        return self.trials if self.trials is not None else self.grid_size

    @property
    def first_values(self) -> dict[str, Any]:
        """A trial's parameters, for what can be said of all trials."""
        return {name: dimension.known()[0] for name, dimension in self.space.items()}

    @property
    def minimizes(self) -> bool:
        return self.direction == "minimize" if self.direction is not None else self.metric == "loss"

    @property
    def watched(self) -> str:
        """The metric that is looked at while a trial trains."""
        return WATCHED_ACCURACY if self.metric == ACCURACY else self.metric

    @property
    def averaged_steps(self) -> int:
        if self.average_steps is not None:
            return self.average_steps
        return 1 if self.watched == WATCHED_ACCURACY else _AVERAGE_STEPS
