"""The project's one exception tree.

    LoopwrightError
    ├── ConfigError (ValueError)        a value the user wrote: what, where, and what to write instead
    │   └── DatasetError                the dataset lacks a column, changed between attempts, or cannot be read
    ├── ServerError                     a vLLM server refused, died or answered nonsense
    │   ├── ServerCapabilityError       the server is up but cannot do what the run needs
    │   └── WeightSyncError             a weight update failed on the server
    ├── RolloutError                    the rollout process
    │   ├── RolloutProcessDied          it ended by itself or by a signal
    │   ├── RolloutFailures             too many rollouts failed; the most frequent cause comes first
    │   └── NoProgress                  nothing moved for `rollout_worker_timeout` seconds
    ├── DivergenceError                 loss or gradient is not finite
    └── CheckpointError                 a checkpoint is incomplete, corrupt or cannot be written

Every class carries `failure_class`, by which the flow's retry policy decides (see `docs/operations.md`):
`infrastructure` is resumed, `user`, `memory`, `divergence` and `no_progress` are not.
"""

from __future__ import annotations

from typing import ClassVar, Literal

FailureClass = Literal["infrastructure", "memory", "user", "no_progress", "divergence"]


class LoopwrightError(Exception):
    """Base of every error Loopwright raises on purpose."""

    failure_class: ClassVar[FailureClass] = "user"


class ConfigError(LoopwrightError, ValueError):
    """A configuration value is wrong; the message says which, why and what to write instead."""


class DatasetError(ConfigError):
    """The dataset cannot be used as configured."""


class ServerError(LoopwrightError):
    """A vLLM server could not be started, reached, or answered with an error."""

    failure_class: ClassVar[FailureClass] = "infrastructure"


class ServerCapabilityError(ServerError, ValueError):
    """The server is healthy but lacks something this run needs; the message names the flag to add."""

    failure_class: ClassVar[FailureClass] = "user"


class WeightSyncError(ServerError):
    """The students did not take the new weights, or serve something else than the trainer holds."""


class RolloutError(LoopwrightError):
    """Base of what the rollout process can end a run with."""

    failure_class: ClassVar[FailureClass] = "infrastructure"


class RolloutProcessDied(RolloutError):
    """The rollout process is gone; the message says how (exit code or signal)."""


class RolloutFailures(RolloutError):
    """More rollouts failed than `max_rollout_failure_frac` allows."""

    failure_class: ClassVar[FailureClass] = "user"


class NoProgress(RolloutError):
    """No stage moved for `rollout_worker_timeout` seconds; the message says which waited for what."""

    failure_class: ClassVar[FailureClass] = "no_progress"


class DivergenceError(LoopwrightError):
    """Loss or gradient norm is NaN or infinite."""

    failure_class: ClassVar[FailureClass] = "divergence"


class CheckpointError(LoopwrightError):
    """A checkpoint could not be written whole, or none that can be read exists."""

    failure_class: ClassVar[FailureClass] = "infrastructure"
