"""The servers that a run starts itself: each has a place with devices; one that dies is started again in its place.

    slot:  start (a thread) ─▶ up ─▶ died, or silent for too long ─▶ stop ─▶ start again, so often in all
                                └──▶ taken away ─▶ the trainer lets go of it ─▶ stop, devices free

Nothing here waits but `ensure` and `stop`; what a thread does is start servers, all else happens in the caller's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from infra.errors import InfraError, NotEnoughGPUs
from trainers.errors import LoopwrightError
from trainers.roster import Listed

UNHEALTHY_S = 60.0  # without an answer on /health, after which a server counts as dead
LEAVE_S = 60.0  # for the trainer to let go of a server that is taken away
POLL_S = 0.2


class Place(Protocol):
    """`flows.started_server.StartedServer`."""

    name: str

    @property
    def url(self) -> str | None: ...
    @property
    def gpus(self) -> int: ...
    @property
    def row(self) -> dict[str, Any]: ...
    def lease(self) -> None: ...
    def start(self, say: Callable[[str], None]) -> None: ...
    def death(self) -> str | None: ...
    def stop(self) -> None: ...
    def give_up(self) -> None: ...


@dataclass(eq=False)
class Slot:
    """A place and what is under way in it. `starting`: until its end was taken note of."""

    place: Place
    starting: Future[None] | None = None
    leave_by: float = 0.0  # monotonic; of one that was taken away

    @property
    def up(self) -> bool:
        return self.starting is None and self.place.url is not None

    @property
    def in_thread(self) -> bool:
        return self.starting is not None and not self.starting.done()


class Fleet:
    """Args:
    make: a new place, its devices not yet leased.
    replacements: how many servers may be started in place of dead ones.
    pause_s: before such a start.
    """

    def __init__(self, make: Callable[[], Place], replacements: int, pause_s: float) -> None:
        self._make, self._replacements, self._pause_s = make, replacements, pause_s
        self._slots: list[Slot] = []
        self._leaving: list[Slot] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="servers")
        self._stopping = threading.Event()
        self.last_death = ""

    @property
    def listed(self) -> list[Listed]:
        """Those that are up."""
        return [Listed(slot.place.name, slot.place.url) for slot in self._slots if slot.up and slot.place.url is not None]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [slot.place.row for slot in self._slots if slot.up]

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs by URL, of all that answer or may: also of those that were taken away and still work."""
        places = [slot.place for slot in [*self._slots, *self._leaving]]
        return {url: place.gpus for place in places if (url := place.url) is not None}

    @property
    def lost(self) -> bool:
        """None is up, and none will be."""
        return not any(slot.up or slot.starting is not None for slot in self._slots)

    @property
    def incomplete(self) -> bool:
        """One is not up, and will not be."""
        return not all(slot.up or slot.starting is not None for slot in self._slots)

    def lease(self, count: int) -> list[Slot]:
        """As many new places.

        Raises:
            NotEnoughGPUs: fewer devices are free; nothing was leased.
        """
        new: list[Slot] = []
        try:
            for _ in range(count):
                place = self._make()
                place.lease()
                new.append(Slot(place))
        except NotEnoughGPUs:
            for slot in new:
                slot.place.give_up()
            raise
        self._slots += new
        return new

    def begin(self) -> None:
        """Start all that are not up; returns at once."""
        for slot in self._slots:
            if slot.starting is None and (slot.place.url is None or slot.place.death() is not None):
                self._start(slot)

    def ensure(self) -> None:
        """Returns when all are up.

        Raises:
            InfraError: one did not start; the others stay.
        """
        self.begin()
        failures: list[Exception] = []
        for slot in self._slots:
            while slot.in_thread:
                self._say()
                time.sleep(POLL_S)
            failures += self._ended(slot)
        self._say()
        if failures:
            raise failures[0]

    def tend(self, silent_s: Mapping[str, float], held: Callable[[], Iterable[str]]) -> None:
        """Replace what died or was silent for too long, and end what was taken away.

        Args:
            silent_s: by URL, for how long there was no answer on /health.
            held: URLs that the trainer may still send requests to.
        """
        self._say()
        for slot in self._slots:
            if slot.starting is not None:
                for error in [] if slot.in_thread else self._ended(slot):
                    again = getattr(error, "failure_class", "") != "user"  # else it would fail in the same way
                    self._lost(slot, f"vLLM server {slot.place.name} did not start: {error}", again)
            elif slot.up and (death := _end_of(slot.place, silent_s)) is not None:
                self._lost(slot, death, again=True)
        urls = set(held()) if self._leaving else set()
        for slot in list(self._leaving):
            if slot.in_thread:
                slot.place.stop()  # ends the start
            elif slot.place.url not in urls or time.monotonic() > slot.leave_by:
                self._leaving.remove(slot)
                slot.place.give_up()

    def death(self) -> str | None:
        """How one died that was not replaced yet."""
        return next((death for slot in self._slots if slot.up and (death := slot.place.death()) is not None), None)

    def add(self, count: int) -> list[str]:
        """Names of as many new servers, which are being started. Raises `NotEnoughGPUs`."""
        new = self.lease(count)
        for slot in new:
            self._start(slot)
        return [slot.place.name for slot in new]

    def newest(self, count: int) -> list[str]:
        """Names of the `count` newest, or of all there are."""
        return [slot.place.name for slot in self._slots[-count:]]

    def take_away(self, names: Iterable[str]) -> None:
        for slot in [slot for slot in self._slots if slot.place.name in set(names)]:
            self._slots.remove(slot)
            slot.leave_by = time.monotonic() + LEAVE_S
            self._leaving.append(slot)

    def stop(self) -> None:
        """End all; devices stay leased for as long as the run has them."""
        self._stopping.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        slots = [*self._slots, *self._leaving]
        while True:
            for slot in slots:
                slot.place.stop()
            if not any(slot.in_thread for slot in slots):
                return
            time.sleep(POLL_S)  # a start that had not yet got as far as a process

    def _start(self, slot: Slot, pause_s: float = 0.0) -> None:
        slot.place.stop()

        def work() -> None:
            if not self._stopping.wait(pause_s):
                slot.place.start(self._lines.put)

        slot.starting = self._threads.submit(work)

    def _ended(self, slot: Slot) -> list[Exception]:
        """Take note of a start that has ended; what it failed of."""
        error, slot.starting = slot.starting.exception() if slot.starting is not None else None, None
        if error is None:
            return []
        if not isinstance(error, InfraError | LoopwrightError):
            raise error
        return [error]

    def _lost(self, slot: Slot, how: str, again: bool) -> None:
        self.last_death = how
        print(how, flush=True)
        slot.place.stop()
        if again and self._replacements:
            self._replacements -= 1
            print(f"{slot.place.name} is started again; {self._replacements} replacements are left", flush=True)
            self._start(slot, self._pause_s)
        elif again:
            print(f"{slot.place.name} is not started again: retry.replace_servers is used up", flush=True)

    def _say(self) -> None:
        while not self._lines.empty():
            print(self._lines.get(), flush=True)


def _end_of(place: Place, silent_s: Mapping[str, float]) -> str | None:
    if (death := place.death()) is not None:
        return death
    if place.url is not None and silent_s.get(place.url, 0.0) > UNHEALTHY_S:
        return f"vLLM server {place.name} has not answered on /health for {UNHEALTHY_S:.0f} s: it is ended"
    return None
