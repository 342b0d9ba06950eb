"""What a run costs: the meter of its flow.

    GPU leases ─ seconds by role ─▶ Meter ─ each minute, and at the end ─▶ registry: costs of the current attempt
    servers ─ of these, busy ─────▶   └─▶ limits.gpu_hours, limits.usd ─▶ the trainer is stopped

Seconds count from lease to release, idle ones too, because that is for how long nobody else had the GPU. The servers' idle
ones, in which no request ran, their start among them, are told beside; the trainer tells its own. What is used before an
attempt (servers start, a first evaluation) counts for that attempt, and what follows it for the last one; of a flow run that
never came to an attempt it stands under attempt 0. A flow that is killed loses the last minute at most. Servers that the run
was given by URL are not its cost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from flows.config import LimitsConfig
from infra.leases import LeaseManager
from infra.patience import plain
from infra.registry import Registry

logger = logging.getLogger(__name__)

WRITE_S = 60.0
HOUR_S = 3600.0


class Meter:
    """Of one flow run. `write` may be called from several threads."""

    def __init__(
        self,
        registry: Registry,
        run_id: str,
        leases: LeaseManager,
        limits: LimitsConfig,
        clock: Callable[[], float] = time.monotonic,
        busy_gpu_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.registry, self.run_id, self.limits = registry, run_id, limits
        self._leases, self._clock, self._busy_gpu_s = leases, clock, busy_gpu_s
        self._lock = threading.Lock()
        rows = registry.list_costs(run_id)
        self._earlier_gpu_s = sum(row.value for row in rows if row.kind.startswith("gpu_s/"))
        self._earlier_usd = sum(row.value for row in rows if row.kind == "usd")
        # Under attempt 0 earlier flow runs may have left something, to which is added.
        self._base = {row.kind: row.value for row in rows if row.attempt == 0}
        self._attempt = 0
        self._before: dict[str, float] = {}  # by kind, what earlier attempts of this flow run used
        self._written = clock()

    def begin_attempt(self, number: int) -> None:
        """From here on, what is used is this attempt's. The first one takes over what was used before it."""
        with self._lock:
            if self._attempt:
                self._store(self.registry)
                self._before = self._seconds()
            self._attempt, self._base = number, {}

    def write(self, patient: bool = True) -> None:
        """What was used so far, to the registry; one that does not take it costs a line in the log."""
        try:
            with self._lock:
                self._written = self._clock()
                self._store(self.registry if patient else plain(self.registry))
        except Exception as error:  # whatever a database's driver raises
            logger.warning("costs of the run are not written: %s: %s", type(error).__name__, error)

    def write_each_minute(self) -> None:
        """To be called often; does not wait for a database."""
        if self._clock() - self._written >= WRITE_S:
            self.write(patient=False)

    def over_limit(self) -> str | None:
        """Which limit is used up, over all attempts of the run; None: none."""
        seconds = sum(self._leases.gpu_seconds().values())
        hours = (self._earlier_gpu_s + seconds) / HOUR_S
        if (limit := self.limits.gpu_hours) is not None and hours >= limit:
            return f"limits.gpu_hours={limit:g} is used up ({hours:.4g}): raise it and resume to go on"
        usd = self._earlier_usd + seconds / HOUR_S * (self.limits.usd_per_gpu_hour or 0.0)
        if (money := self.limits.usd) is not None and usd >= money:
            return f"limits.usd={money:g} is used up ({usd:.4g}): raise it and resume to go on"
        return None

    def _seconds(self) -> dict[str, float]:
        """By kind, of this flow run so far."""
        leased = self._leases.gpu_seconds()
        seconds = {f"gpu_s/{role}": value for role, value in leased.items()}
        for role, busy in self._busy_gpu_s().items():
            if role in leased:
                seconds[f"idle_gpu_s/{role}"] = max(0.0, leased[role] - busy)
        return seconds

    def _store(self, registry: Registry) -> None:
        costs = {kind: seconds - self._before.get(kind, 0.0) for kind, seconds in self._seconds().items()}
        if self.limits.usd_per_gpu_hour is not None and costs:
            gpu_s = sum(seconds for kind, seconds in costs.items() if kind.startswith("gpu_s/"))
            costs["usd"] = gpu_s / HOUR_S * self.limits.usd_per_gpu_hour
        if costs:
            registry.add_costs(self.run_id, self._attempt, {kind: self._base.get(kind, 0.0) + v for kind, v in costs.items()})
