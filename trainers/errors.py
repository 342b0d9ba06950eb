"""The project's one exception tree.

    LoopwrightError
    ├── ConfigError (ValueError)        a value the user wrote: what, where, and what to write instead
    │   └── DatasetError                the dataset lacks a column, changed between attempts, or cannot be read
    ├── ServerError                     a vLLM server refused, died or answered nonsense
    │   ├── ServerCapabilityError       the server is up but cannot do what the run needs
    │   └── WeightSyncError             a weight update failed on the server
    ├── RolloutError                    the rollout process
    │   ├── RolloutProcessDied          it ended by itself or by a signal
    │   ├── RolloutCodeError            the user's code in it raised, or ours in a way that nobody foresaw
    │   ├── RolloutFailures             too many rollouts failed; the most frequent cause comes first
    │   └── NoProgress                  nothing moved for `rollout_worker_timeout` seconds
    ├── DivergenceError                 loss or gradient is not finite
    └── CheckpointError                 a checkpoint is incomplete, corrupt or cannot be written

Every class carries `failure_class`, by which the flow's retry policy decides (see `docs/operations.md`):
`infrastructure` is resumed, `user`, `memory`, `divergence` and `no_progress` are not.
"""

from __future__ import annotations

import traceback as format_error
from typing import ClassVar, Literal, TypeVar

FailureClass = Literal["infrastructure", "memory", "user", "no_progress", "divergence"]
E = TypeVar("E", bound=BaseException)
_USERS_PART = "_loopwright_users_part"


def came_from(error: E, traceback: str) -> E:
    """`error`, with the traceback that it stands for: of code that ran in another process, or only as one of many."""
    setattr(error, _USERS_PART, traceback)
    error.add_note(f"It came from:\n{traceback}")
    return error


def full_traceback(error: BaseException) -> str:
    """The user's part first, then where this process met the error."""
    here = format_error.TracebackException.from_exception(error)
    if (users := users_part(error)) is None:
        return "".join(here.format())
    here.__notes__ = []  # type: ignore[attr-defined] - it is the user's part once more
    return f"{users}\n\nthe trainer heard of it here:\n{''.join(here.format())}"


def users_part(error: BaseException) -> str | None:
    """The traceback that `came_from` gave to an error."""
    return getattr(error, _USERS_PART, None)


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
    status: int | None = None  # of the answer, where there was one


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


class RolloutCodeError(RolloutError):
    """An exception in the rollout process that is none of these: of a hook, the data, or a fault of ours."""

    failure_class: ClassVar[FailureClass] = "user"


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
