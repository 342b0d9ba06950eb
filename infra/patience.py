"""Waiting for a database that is out of reach, in one place.

    flow ──▶ patient(registry).update_run(…) ──▶ the call, again and again with growing pauses, until the database answers
    trainer's registry thread ──▶ patiently(call)

Only what an outage looks like is waited for: refused or cut connections, a database that is locked for longer than its own
patience, a full disk. Anything else is raised at once. A call whose answer was lost is made again, so a call must bear that:
the registry's do, but for a lease that is taken twice, which the reaper frees when its owner ends.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from infra.registry import Registry

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_S = 24 * 3600.0  # a flow's: an outage over night must not cost a run that has trained
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
_SQLITE_AWAY = ("locked", "busy", "full", "disk i/o", "unable to open")
_REFUSED = ("authentication failed", "does not exist")


def out_of_reach(error: BaseException) -> bool:
    """Whether this is how a database fails that may be back later."""
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

    text = str(error).lower()
    cause = getattr(error, "orig", error)
    if isinstance(cause, sqlite3.Error):  # it has one class for a lock, a full disk and a misspelt query
        return any(phrase in text for phrase in _SQLITE_AWAY)
    if isinstance(error, OperationalError):
        return not any(phrase in text for phrase in _REFUSED)
    return isinstance(error, InterfaceError | TimeoutError) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def patiently(
    call: Callable[[], T], patience_s: float = PATIENCE_S, what: str = "registry", wait: Callable[[float], Any] = time.sleep
) -> T:
    """The call's result, however long the database is away, up to `patience_s`; then what it raised last.

    Args:
        wait: sleeps the given seconds; true: do not try again.
    """
    began, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            result = call()
        except Exception as error:
            if not out_of_reach(error) or time.monotonic() - began >= patience_s:
                raise
            if pause == FIRST_PAUSE_S:
                log.warning("%s: out of reach (%s); going on when it is back", what, str(error).splitlines()[0])
            if wait(pause):
                raise
            pause = min(2 * pause, LONGEST_PAUSE_S)
        else:
            if pause > FIRST_PAUSE_S:
                log.warning("%s: back after %.0f s", what, time.monotonic() - began)
            return result


class _Patient:
    def __init__(self, registry: Registry, patience_s: float) -> None:
        self.plain, self._patience_s = registry, patience_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.plain, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: patiently(partial(found, *args, **kwargs), self._patience_s, f"registry, {name}")


def patient(registry: Registry, patience_s: float = PATIENCE_S) -> Registry:
    """The registry, each of whose calls waits for the database while it is out of reach."""
    return cast("Registry", _Patient(registry, patience_s))


def plain(registry: Registry) -> Registry:
    """The registry without the patience, for a caller that has other things to look after."""
    return getattr(registry, "plain", registry)


def open_patiently(patience_s: float = PATIENCE_S) -> Registry:
    """The default registry, opened when its database answers."""
    from infra.registry import Registry

    return patiently(Registry, patience_s, "registry, opening")
