"""The student servers of a run: those it starts itself, or those given by URL; they may die, come and go while it trains.

    ensure (before an attempt)  all up and able ─▶ servers.json ─▶ trainer
    tend (while it trains)      fleet: dead ones replaced ─┐
                                `loopwright servers` asks ─┴▶ servers.json, if it changes

Invariants: servers.json lists exactly those that are up and able, and those given by URL, and is never empty; all servers of
a run have one key, because a trainer has one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flows.busy import Busy
from flows.config import GeneratingRunConfig
from flows.fleet import UNHEALTHY_S, Fleet, Place
from flows.named_servers import addresses_of
from flows.server_health import Pulse, Silence
from flows.server_requests import Request, Requests
from flows.student import Student, needs
from infra.errors import InfraError, NotEnoughGPUs, ServerUnreachable
from infra.leases import LeaseManager
from infra.registry import Registry, RunRow
from infra.vllm import lacking, probe
from trainers.errors import LoopwrightError, ServerCapabilityError
from trainers.roster import Listed, plain_url, read_serving, write_servers


class Students:
    """`flows.training.Servers` of a run that generates.

    Args:
        make: a place for a server, by name; default: a `Student`.
        check: that a server given by its URL can do what the run needs; raises `InfraError` or `ServerCapabilityError`.
    """

    def __init__(
        self,
        config: GeneratingRunConfig,
        run: RunRow,
        registry: Registry,
        leases: LeaseManager,
        make: Callable[[str], Place] | None = None,
        check: Callable[[str], None] | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        assert run.output_dir is not None, run.id
        self._config, self._folder = config, Path(run.output_dir)
        given = config.servers.student
        urls, key = addresses_of(given.urls, given, registry)
        self._key = key or os.environ.get(given.api_key_env) or ("" if given.urls else secrets.token_urlsafe(32))
        self._check = check or self._check_able
        self._numbers = 0
        self._given: dict[str, Listed] = {}  # by URL
        for url in urls:
            self._given[url] = Listed(self._next_name(), url)
        make = make or (lambda name: Student(config, run, registry, leases, name, self._key))
        self._fleet = Fleet(lambda: make(self._next_name()), config.retry.replace_servers, config.retry.backoff_s)
        self._busy = Busy(lambda: self._fleet.gpus, self._key)
        self._requests = Requests(self._folder)
        self._checks: list[tuple[Request, str, Future[None]]] = []
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="server checks")
        self._pulse = pulse or Pulse()
        self._silence = Silence()
        self._away: set[str] = set()  # URLs of given ones not there when the attempt began: not listed
        self._written: list[Listed] = []

    def _next_name(self) -> str:
        self._numbers += 1
        return f"student-{self._numbers - 1}"

    def _check_able(self, url: str) -> None:
        missing = lacking(probe(url, self._key), needs(self._config))
        if missing:
            raise ServerCapabilityError(f"the vLLM server at {url} cannot do what this run needs: {'; '.join(missing)}")

    def lease(self) -> None:
        """Devices of every server that the run starts, for its whole life.

        Raises:
            NotEnoughGPUs: fewer are free.
        """
        if not self._given:
            self._fleet.lease(self._config.servers.student.count)
        self._busy.start()  # a run with given ones may be asked to start some besides

    def ensure(self) -> None:
        """Every server up and able to do what the run needs: those there are, else new ones. One given by URL that was there
        before may be away if another is there.

        Raises:
            InfraError: one did not start, does not answer, or lacks something.
            ServerCapabilityError: one given by URL lacks something.
        """
        away: dict[str, ServerUnreachable] = {}
        for url in self._given:
            try:
                self._check(url)
            except ServerUnreachable as error:
                away[url] = error
        if away and (not self._written or len(away) == len(self._given)):
            raise next(iter(away.values()))
        self._away = set(away)
        self._fleet.ensure()
        self._write()

    def tend(self) -> str | None:
        """Look after the servers of a trainer that runs, without waiting. How the last one died, if none is left."""
        for request in self._requests.take():
            self._do(request)
        self._answer_checked()
        silent_s = self._pulse.silent_s([*self._given, *(server.url for server in self._fleet.listed)])
        names = {url: server.name for url, server in self._given.items()}
        self._away -= self._silence.say(names, silent_s, UNHEALTHY_S, self._away)
        self._fleet.tend(silent_s, lambda: [server.url for server in read_serving(self._folder)])
        self._write()
        return self._fleet.last_death if not self._given and self._fleet.lost else None

    def death(self) -> str | None:
        """How a server that the run started died, and was not replaced yet; one given by URL is only seen from outside."""
        return self._fleet.death()

    def stop(self) -> None:
        """Stop what was started; harmless when there is nothing."""
        self._fleet.stop()
        self._busy.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pulse.close()

    # For the trainer and for people

    def config_fields(self) -> dict[str, Any]:
        urls = [server.url for server in self._listed()]
        return {"vllm_server_base_url": urls[0] if len(urls) == 1 else urls}

    def environment(self) -> dict[str, str]:
        return {"VLLM_API_KEY": self._key}

    def serving(self, version: int) -> list[str]:
        """URLs of the servers that hold policy `version`, as the trainer last said."""
        return [server.url for server in read_serving(self._folder) if server.version == version]

    def rows(self) -> list[dict[str, Any]]:
        given = [{"name": one.name, "url": one.url, "model": "", "version": "", "log": ""} for one in self._given.values()]
        return [*given, *self._fleet.rows]

    def busy_gpu_s(self) -> dict[str, float]:
        return {"student": self._busy.seconds}

    def _listed(self) -> list[Listed]:
        return [*(server for url, server in self._given.items() if url not in self._away), *self._fleet.listed]

    def _write(self) -> None:
        """Tell the trainer, if there are others than it knows of. With none at all it waits for one."""
        servers = self._listed()
        if servers and servers != self._written:
            write_servers(self._folder, servers)
            self._written = servers

    # What `loopwright servers` asks

    def _do(self, request: Request) -> None:
        url = plain_url(request.url) if request.url is not None else None
        if request.action == "remove":
            self._requests.answer(request, *self._remove(url, request.count))
        elif url is None:
            try:
                names = ", ".join(self._fleet.add(request.count))
                print(f"asked for: {names}", flush=True)
                text = f"{names}: being started; a server gets requests once it holds the current weights"
                self._requests.answer(request, True, text)
            except NotEnoughGPUs as error:
                self._requests.answer(request, False, str(error))
        elif any(server.url == url for server in self._listed()):
            self._requests.answer(request, False, f"{url} is one of the run's servers already")
        else:
            self._checks.append((request, url, self._threads.submit(self._check, url)))

    def _answer_checked(self) -> None:
        for check in [check for check in self._checks if check[2].done()]:
            self._checks.remove(check)
            request, url, future = check
            error = future.exception()
            if isinstance(error, InfraError | LoopwrightError):
                self._requests.answer(request, False, str(error))
            elif error is not None:
                raise error
            else:
                name = self._next_name()
                self._given[url] = Listed(name, url)
                print(f"asked for: {name} ({url})", flush=True)
                self._requests.answer(request, True, f"{name}: {url} gets requests once it holds the current weights")

    def _remove(self, url: str | None, count: int) -> tuple[bool, str]:
        if url is None:
            names = self._fleet.newest(count)
            if len(names) < count:
                return False, f"the run has started {len(names)} servers itself: {count} cannot be taken away"
        else:
            names = [server.name for server in self._listed() if server.url == url]
            if url in self._away:
                return True, f"{self._given.pop(url).name}: taken away; it was not there"
            if not names:
                return False, f"{url} is none of the run's servers: {', '.join(server.url for server in self._listed())}"
        if all(server.name in names for server in self._listed()):
            return False, "a run needs a server that is up: add another one first, and wait until it is listed"
        if url in self._given:
            del self._given[url]
        self._fleet.take_away(names)
        print(f"taken away: {', '.join(names)}", flush=True)
        return True, f"{', '.join(names)}: taken away; requests go to the others"
