"""The teachers of a distillation run: those it starts itself, and those given by URL or name, which other runs may use too.

    ensure (before an attempt)  all up and able ─▶ addresses and keys ─▶ trainer
    tend (while it trains)      one that died is started again at its address; the trainer waits for it

Invariants: a teacher has one address for the run's whole life; a teacher given by URL is never stopped, and gets no key but
its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flows.busy import Busy
from flows.config import DistillationRunConfig
from flows.fleet import UNHEALTHY_S, Fleet, Place
from flows.named_servers import address_of
from flows.server_health import Pulse, Silence
from flows.teacher import PREFIX, Teacher, needs
from infra.leases import LeaseManager
from infra.registry import Registry, RunRow
from infra.vllm import lacking, probe
from trainers.config_distillation import key_variable
from trainers.errors import ServerCapabilityError


class Teachers:
    """All of them.

    Args:
        make: a place for the teacher of that name; default: a `Teacher`.
        check: that the teacher at a URL, with its key, can do what the run needs.
    """

    def __init__(
        self,
        config: DistillationRunConfig,
        run: RunRow,
        registry: Registry,
        leases: LeaseManager,
        make: Callable[[str], Place] | None = None,
        check: Callable[[str, str | None], None] | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._config = config
        teachers = config.servers.teachers
        self._own = [name for name, teacher in teachers.items() if teacher.url is None]
        self._given: dict[str, tuple[str, str | None]] = {}  # name → address, key
        for name, teacher in teachers.items():
            if teacher.url is not None:
                self._given[name] = address_of(teacher.url, teacher, registry)
        self._key = os.environ.get("VLLM_API_KEY") or secrets.token_urlsafe(32)  # of those that the run starts
        self._check = check or self._check_able
        make = make or (lambda name: Teacher(config, run, registry, leases, name, self._key))
        places = iter(self._own)
        self._fleet = Fleet(lambda: make(next(places)), config.retry.replace_servers, config.retry.backoff_s)
        self._urls: dict[str, str] = {}  # of the run's own, by the place's name, once they were up
        self._busy = Busy(lambda: self._fleet.gpus, self._key)
        self._pulse = pulse or Pulse()
        self._silence = Silence()

    def _check_able(self, url: str, key: str | None) -> None:
        if missing := lacking(probe(url, key), needs(self._config)):
            raise ServerCapabilityError(f"the teacher at {url} cannot do what this run needs: {'; '.join(missing)}")

    def lease(self) -> None:
        """Devices of every teacher that the run starts, for its whole life. Raises `NotEnoughGPUs`."""
        if self._own:
            self._fleet.lease(len(self._own))
            self._busy.start()

    def begin(self) -> None:
        """Start those of the run that are not up, without waiting."""
        self._fleet.begin()

    def ensure(self) -> None:
        """Every teacher up and able.

        Raises:
            InfraError: one did not start, does not answer, or lacks something.
            ServerCapabilityError: one given by URL lacks something.
        """
        self.begin()
        with ThreadPoolExecutor(8, thread_name_prefix="teacher checks") as threads:
            list(threads.map(lambda given: self._check(*given), self._given.values()))
        self._fleet.ensure()
        self._urls |= {server.name.removeprefix(PREFIX): server.url for server in self._fleet.listed}

    def tend(self) -> str | None:
        """Look after them while a trainer runs; does not wait. How one died that does not come back: its rows wait in vain."""
        own = [server.url for server in self._fleet.listed]
        given = {url: f"teacher {name}" for name, (url, _) in self._given.items()}
        silent_s = self._pulse.silent_s([*own, *given])
        self._silence.say(given, silent_s, UNHEALTHY_S)
        self._fleet.tend(silent_s, lambda: [])
        return self._fleet.last_death if self._fleet.incomplete else None

    def death(self) -> str | None:
        return self._fleet.death()

    def stop(self) -> None:
        """Stop what was started; harmless when there is nothing."""
        self._fleet.stop()
        self._busy.close()
        self._pulse.close()

    # For the trainer and for people

    def addresses(self) -> dict[str, str]:
        """By name, in the config's order; empty for one that was never up."""
        own = {name: self._urls.get(name, "") for name in self._own}
        return {name: own[name] if name in own else self._given[name][0] for name in self._config.servers.teachers}

    def environment(self) -> dict[str, str]:
        """Each teacher's key in a variable of its own; empty: it is asked without one."""
        keys = dict.fromkeys(self._own, self._key) | {name: key or "" for name, (_, key) in self._given.items()}
        return {key_variable(name): key for name, key in keys.items()}

    def rows(self) -> list[dict[str, Any]]:
        given = [
            {"name": f"{PREFIX}{name}", "url": url, "model": "", "version": "", "log": ""}
            for name, (url, _) in self._given.items()
        ]
        return [*given, *self._fleet.rows]

    def busy_gpu_s(self) -> dict[str, float]:
        return {"teacher": self._busy.seconds}
