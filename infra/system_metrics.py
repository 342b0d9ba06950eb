"""Load of the machine, under the names by which MLflow's page finds it (`system/…`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class SystemSampler:
    """A thread that calls `report({name: value})` now and every `interval_s` until `stop`. MLflow's monitors do the reading.

    GPUs are read where the driver answers, else left out.
    """

    def __init__(self, report: Callable[[dict[str, float]], None], interval_s: float) -> None:
        self._report = report
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loopwright-system-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        monitors = _monitors()
        stopped = False
        while not stopped:
            values: dict[str, float] = {}
            for monitor in monitors:
                try:
                    monitor.collect_metrics()
                    values |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                    monitor.clear_metrics()
                except Exception as error:
                    log.warning("tracking: no system metrics from %s: %s", type(monitor).__name__, error)
            self._report(values)
            stopped = self._stopping.wait(self._interval_s)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)


def _monitors() -> list:
    from infra.tracking_mlflow import prepare_environment

    prepare_environment()
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for device in (GPUMonitor, ROCMMonitor):
        try:
            monitors.append(device())
        except Exception as error:
            log.debug("no %s: %s", device.__name__, error)
    return monitors
