"""The trials of a sweep as processes: `flows.sweep_loop.Runner` over `python -m flows.sweep_trial`.

    sweep ─ supervisor ─ trial's flow run ─ supervisors ─ trainer, servers

Nothing of a trial outlives the sweep: its supervisor watches the sweep's process, and the reaper finds it by its lease.
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

from flows.config import GRPORunConfig, RunConfig
from flows.sweep_space import trial_name
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
class _Trial:
    process: Supervised
    lease: Lease
    gpus: int
    asked_to_stop: bool = False


class TrialProcesses:
    """Starts, watches and stops trials. `folder`: where their configs and logs go; `gpus`: those of this machine."""

    def __init__(
        self, registry: Registry, leases: LeaseManager, folder: Path, gpus: Callable[[], list[int]] = visible_gpus
    ) -> None:
        self._registry, self._leases, self._folder, self._gpus = registry, leases, folder, gpus
        self._trials: dict[int, _Trial] = {}
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
        # A trial that has just started has no lease of its GPUs yet: count what ours need, and what others hold.
        names = {trial_name(config.sweep.name, number) for number in self._trials} if config.sweep else set()
        our_runs = {run.id for name in names if (run := self._registry.find_run(name)) is not None}
        others = [lease for lease in self._registry.list_leases("gpu", self._leases.owner.host) if lease.run_id not in our_runs]
        free = present - len(others) - sum(trial.gpus for trial in self._trials.values())
        if free < needed and not self._trials and not self._told:
            print(f"waiting for GPUs: a trial needs {needed}, {max(free, 0)} of {present} are free", flush=True)
        self._told = free < needed
        return free >= needed

    def start(self, number: int, config: RunConfig) -> None:
        path = self._folder / "trials" / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False), encoding="utf-8")
        lease = self._leases.lease_process(f"trial {config.name}")
        # Of the flow run that this sweep is, nothing may reach the trial's own: it would be taken for it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT__")}
        environment[URL_VARIABLE] = self._registry.url
        try:
            process = Supervised.start(
                [sys.executable, "-m", "flows.sweep_trial", str(path)],
                env=environment,
                log=self._folder / "logs" / f"trial-{number}.log",
                lease=lease.id,
                grace_s=GRACE_S,
            )
        except BaseException:
            self._leases.release(lease)
            raise
        self._trials[number] = _Trial(process, lease, gpus_needed(config, bool(self._gpus())))

    def ended(self, number: int) -> str | None:
        trial = self._trials.get(number)
        if trial is None:
            return "its process is not known"
        if trial.process.poll() is None:
            return None
        del self._trials[number]
        self._leases.release(trial.lease)
        how = trial.process.describe_exit()
        if trial.process.returncode == 0:
            return how
        return f"{how}\nend of {trial.process.log_path}:\n{trial.process.log_tail(_TAIL_LINES)}"

    def stop(self, number: int) -> None:
        trial = self._trials.get(number)
        if trial is not None and not trial.asked_to_stop:  # a second signal would shorten its grace
            trial.asked_to_stop = True
            with suppress(ProcessLookupError):
                os.kill(trial.process.supervisor_pid, signal.SIGTERM)

    def stop_all(self) -> None:
        """All at once; returns when nothing of them is left."""
        for number in self._trials:
            self.stop(number)
        deadline = time.monotonic() + GRACE_S
        for number, trial in list(self._trials.items()):
            while trial.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            trial.process.stop(0.0)
            with suppress(Exception):  # the registry may be away: the reaper frees the lease then
                self._leases.release(trial.lease)
            del self._trials[number]


def gpus_needed(config: RunConfig, there: bool) -> int:
    """GPUs a run leases for its trainer and the servers it starts, on a machine where there are any or not."""
    wanted = config.trainer.gpus
    count = (config.trainer.ranks if there else 0) if wanted is None else wanted
    if isinstance(config, GRPORunConfig) and not config.servers.student.urls:
        student = config.servers.student
        count += student.count * ((student.gpus_needed if there else 0) if student.gpus is None else student.gpus)
    return count
