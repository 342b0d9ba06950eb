"""How runs fail: of which class a failure is, what its cause is called, whether and when it is tried again.

    exception ─▶ failure_of, describe ─▶ Outcome ─▶ Policy.wait: backoff, then again ─▶ … ─▶ used up: RunFailed

Classes are those of `trainers.errors.FailureClass`; `retry` has for each how often it is tried again.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from traceback import format_exception
from typing import get_args

from flows.config import RetryConfig
from infra.errors import InfraError
from infra.redaction import redact
from trainers.errors import FailureClass, LoopwrightError

MAX_BACKOFF_S = 300.0


class RunFailed(LoopwrightError):
    """A run ended without success; `str()` is the cause, in one line first."""

    def __init__(self, failure: FailureClass, cause: str, traceback: str | None = None) -> None:
        super().__init__(cause)
        self.failure: FailureClass = failure
        self.traceback = traceback


@dataclass
class Outcome:
    """How an attempt ended; `failure` None: finished."""

    failure: FailureClass | None = None
    cause: str = ""
    traceback: str | None = None
    of_servers: bool = False  # they did not start: the trainer never did


class Policy:
    """Counts failures by class and waits between attempts, or gives up."""

    def __init__(self, retry: RetryConfig) -> None:
        self._retry = retry
        self._failures: Counter[str] = Counter()

    def wait(self, outcome: Outcome, what: str, time_left_s: float = float("inf")) -> None:
        """Returns when it is time to try again.

        Raises:
            RunFailed: with the outcome, when its class has used up its tries or no time is left.
        """
        assert outcome.failure is not None
        self._failures[outcome.failure] += 1
        pause = backoff_s(self._retry, outcome.failure, self._failures[outcome.failure])
        if pause is None or time_left_s <= pause:
            raise RunFailed(outcome.failure, outcome.cause, outcome.traceback)
        cause = outcome.cause.splitlines()[0]
        print(f"{what} failed ({outcome.failure}): {cause}; going on in {pause:.0f} s", flush=True)
        time.sleep(pause)


def failure_of(error: BaseException) -> FailureClass:
    """The retry policy's class of an exception; what nobody foresaw counts as the user's, so that it is not repeated."""
    known: tuple[FailureClass, ...] = get_args(FailureClass)
    failure = getattr(error, "failure_class", "user")
    return failure if failure in known else "user"


def describe(error: BaseException) -> str:
    """The cause that an exception stands for; of one that nobody foresaw, with its type."""
    text = redact(str(error)).strip()
    if isinstance(error, InfraError | LoopwrightError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run_failed(error: Exception) -> RunFailed:
    """What ended a run, with its class, its cause and where it was raised."""
    if isinstance(error, RunFailed):
        return RunFailed(error.failure, describe(error), error.traceback)
    return RunFailed(failure_of(error), describe(error), redact("".join(format_exception(error))))


def backoff_s(policy: RetryConfig, failure: FailureClass, count: int) -> float | None:
    """Seconds to wait before resuming after the `count`-th failure of its class; None: give up."""
    if count > getattr(policy, failure):
        return None
    return min(policy.backoff_s * 2 ** (count - 1), MAX_BACKOFF_S)


def stopped_by(error: BaseException) -> str:
    """Who stopped a flow, by the exception that ended it."""
    if type(error).__name__ == "TerminationSignal":
        from prefect._internal.control_listener import get_intent

        return "cancelled in Prefect" if get_intent() == "cancel" else "stopped by SIGTERM"
    return "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"stopped from outside ({type(error).__name__})"
