"""Runs as processes of another flow: the trials of a sweep (`flows.sweep_loop.Runner`), the stages of a recipe.

    sweep ─ supervisor ─ trial's flow run ─ supervisors ─ trainer, servers

Nothing of a run outlives the flow that started it: its supervisor watches that process, and the reaper finds it by its lease.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flows.config import DistillationRunConfig, GeneratingRunConfig, RunConfig
from flows.training import STOP_GRACE_S
from infra.gpus import visible_gpus
from infra.leases import Lease, LeaseManager
from infra.process import Supervised
from infra.reaper import owner_alive
from infra.registry import Registry
from infra.registry_core import URL_VARIABLE

logger = logging.getLogger(__name__)
# A trial's flow stops its trainer, which may write a checkpoint, and says in MLflow and Prefect how it ended.
GRACE_S = STOP_GRACE_S + 20.0
_TAIL_LINES = 5


@dataclass
class _Running:
    name: str
    process: Supervised
    lease: Lease
    gpus: int
    asked_to_stop: bool = False


class RunProcesses:
    """Starts, watches and stops runs, each by a key of the caller's.

    Args:
        folder: where their configs and logs go.
        gpus: those of this machine.
        what: the runs are called.
    """

    def __init__(
        self,
        registry: Registry,
        leases: LeaseManager,
        folder: Path,
        gpus: Callable[[], list[int]] = visible_gpus,
        what: str = "trial",
    ) -> None:
        self._registry, self._leases, self._folder, self._gpus = registry, leases, folder, gpus
        self._what = what
        self._running: dict[int | str, _Running] = {}
        self._told = False

    def ready(self, config: RunConfig) -> bool:
        """Whether its GPUs are free and nobody works on its run."""
        run = self._registry.find_run(str(config.name))
        if run is not None and run.owner is not None and owner_alive(run.owner):
            return False
        present = len(self._gpus())
        needed = gpus_needed(config, present > 0)
        if needed == 0 or needed > present:  # more than there are: the run itself says so
            return True
        # One that has just started has no lease of its GPUs yet: count what ours need, and what others hold.
        ours = [one.name for one in self._running.values()]
        our_runs = {run.id for name in ours if (run := self._registry.find_run(name)) is not None}
        others = [lease for lease in self._registry.list_leases("gpu", self._leases.owner.host) if lease.run_id not in our_runs]
        free = present - len(others) - sum(one.gpus for one in self._running.values())
        if free < needed and not self._running and not self._told:
            print(f"waiting for GPUs: a {self._what} needs {needed}, {max(free, 0)} of {present} are free", flush=True)
        self._told = free < needed
        return free >= needed

    def start(self, key: int | str, config: RunConfig) -> None:
        path = self._folder / f"{self._what}s" / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False), encoding="utf-8")
        lease = self._leases.lease_process(f"{self._what} {config.name}")
        # Of the flow run that starts it, nothing may reach the run's own: it would be taken for it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT__")}
        environment[URL_VARIABLE] = self._registry.url
        try:
            process = Supervised.start(
                [sys.executable, "-m", "flows.child_run", str(path)],
                env=environment,
                log=self._folder / "logs" / f"{self._what}-{key}.log",
                lease=lease.id,
                grace_s=GRACE_S,
            )
        except BaseException:
            self._leases.release(lease)
            raise
        self._running[key] = _Running(str(config.name), process, lease, gpus_needed(config, bool(self._gpus())))

    def ended(self, key: int | str) -> str | None:
        one = self._running.get(key)
        if one is None:
            return "its process is not known"
        if one.process.poll() is None:
            return None
        del self._running[key]
        self._leases.release(one.lease)
        how = one.process.describe_exit()
        if one.process.returncode == 0:
            return how
        return f"{how}\nend of {one.process.log_path}:\n{one.process.log_tail(_TAIL_LINES)}"

    def stop(self, key: int | str) -> None:
        one = self._running.get(key)
        if one is not None and not one.asked_to_stop:  # a second signal would shorten its grace
            one.asked_to_stop = True
            with suppress(ProcessLookupError):
                os.kill(one.process.supervisor_pid, signal.SIGTERM)

    def stop_all(self) -> None:
        """All at once; returns when nothing of them is left."""
        for key in self._running:
            self.stop(key)
        deadline = time.monotonic() + GRACE_S
        for key, one in list(self._running.items()):
            while one.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            one.process.stop(0.0)
            with suppress(Exception):  # the registry may be away: the reaper frees the lease then
                self._leases.release(one.lease)
            del self._running[key]


def gpus_needed(config: RunConfig, there: bool) -> int:
    """GPUs a run leases for its trainer and the servers it starts, on a machine where there are any or not."""
    count = config.trainer.gpus_leased(there)
    if isinstance(config, GeneratingRunConfig) and not config.servers.student.urls:
        count += config.servers.student.count * config.servers.student.gpus_leased(there)
    if isinstance(config, DistillationRunConfig):
        count += sum(one.gpus_leased(there) for one in config.servers.teachers.values() if one.url is None)
    return count
