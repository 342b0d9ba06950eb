"""A server that a run starts: its place in the run has GPUs, each start has a process of its own.

    StartedServer (place, GPUs) ── start ─▶ port lease ─▶ process ─▶ ready and able ── … ── died ─▶ stop ─▶ start again

Starting blocks and has a thread of its own (`flows.fleet`); `stop` may come from another thread meanwhile, and ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from flows.config_servers import ServerConfig
from infra.gpus import visible_gpus
from infra.home import home
from infra.leases import GpuLease, LeaseManager, PortLease
from infra.registry import Registry, RunRow
from infra.vllm import Needs, ServerSpec, VLLMServer, start_server
from trainers.references import resolve

STARTING_GRACE_S = 1.0


def common_spec(given: ServerConfig, name: str, gpus: GpuLease) -> dict[str, Any]:
    """Fields of a `ServerSpec` that the config says, or where it runs."""
    return {
        "name": name,
        "python": resolve(given.python),
        "device": "cuda" if gpus.devices else "cpu",
        "tensor_parallel_size": given.tensor_parallel_size,
        "max_model_len": given.max_model_len,
        "dtype": given.dtype,
        "extra_args": tuple(resolve(given.extra_args)),
        "env": resolve(given.env),
    }


class StartedServer(ABC):
    """A place for one server; what is served, and what the run needs of it, say `flows.student` and `flows.teacher`.

    Args:
        given: how the config wants it started.
        key: wanted by the server, and known to the trainer.
        ready_s: seconds to wait for it to be ready.
    """

    role: ClassVar[str]
    """Under which its GPUs are counted."""
    same_address: ClassVar[bool] = False
    """Whether it keeps its port over restarts, for those who know it by its address."""

    def __init__(
        self,
        given: ServerConfig,
        run: RunRow,
        registry: Registry,
        leases: LeaseManager,
        name: str,
        key: str,
        ready_s: float,
    ) -> None:
        self.name = name
        self._given, self._run, self._registry, self._leases = given, run, registry, leases
        self._key, self._ready_s = key, ready_s
        self._gpus = GpuLease()
        self._port: PortLease | None = None
        self._server: VLLMServer | None = None
        self._row_id = ""
        self._details: dict[str, Any] = {}

    @abstractmethod
    def _spec(self) -> ServerSpec:
        """How to start it; once `lease` was called."""

    @abstractmethod
    def _needs(self) -> Needs:
        """What the run needs of it."""

    def _common_spec(self) -> dict[str, Any]:
        return common_spec(self._given, self.name, self._gpus)

    def lease(self) -> None:
        """Devices for as long as the place is kept; the port is leased with each start.

        Raises:
            NotEnoughGPUs: fewer are free.
        """
        count = self._given.gpus_leased(bool(visible_gpus()))
        self._gpus = self._leases.lease_gpus(count, self._run.id, self.role)

    def start(self, say: Callable[[str], None]) -> None:
        """Returns when the server is up and can do what the run needs; `say` is told how it goes.

        Raises:
            InfraError: it did not start, or lacks something; nothing of it is left.
        """
        self._port = self._port or self._leases.lease_port(self._run.id)
        log = home() / "servers" / self._run.name / f"{self.name}.log"
        try:
            port = self._port
            server = start_server(self._spec(), port, self._gpus.devices, key=self._key, log_path=log)
            self._server = server
            self._row_id = self._registry.record_server(
                self._run.id, self.name, server.url, server.process.pid, lease_id=port.id, log_path=str(log)
            ).id
            server.wait_ready(self._ready_s, on_progress=say)
            server.require(self._needs())
            found = server.capabilities()
        except BaseException:
            self.stop()
            raise
        self._details = {
            "name": self.name, "url": server.url, "model": found.model, "version": found.version,
            "max_model_len": found.max_model_len, "device": found.device, "log": str(log),
        }  # fmt: skip

    @property
    def url(self) -> str | None:
        """Of the server, once it was ready."""
        return self._details.get("url")

    @property
    def gpus(self) -> int:
        """That are leased for it."""
        return len(self._gpus.devices)

    @property
    def row(self) -> dict[str, Any]:
        """What to show of it; empty while it is not ready."""
        return self._details

    def death(self) -> str | None:
        """How the server died and the end of its log; None: it lives, or there is none."""
        server = self._server
        if server is None or server.alive():
            return None
        how = server.describe_exit()
        self._registry.end_server(self._row_id, how)
        return f"vLLM server {self.name} died: {how}\nend of {server.log_path}:\n{server.process.log_tail(15)}"

    def stop(self) -> None:
        """Stop what was started; the devices stay leased, and the port where the address is to stay."""
        ready, self._details = bool(self._details), {}
        # Taken at once: a start that is given up in its thread ends here too.
        server, self._server = self._server, None
        if server is not None:
            # One that is still starting has nothing to finish, and may not listen to SIGTERM before it is done.
            server.stop(None if ready else STARTING_GRACE_S)
            self._registry.end_server(self._row_id, server.describe_exit())
        if not self.same_address:
            self._free_port()

    def give_up(self) -> None:
        """Stop it and free its devices."""
        self.stop()
        self._free_port()
        self._leases.release(self._gpus)
        self._gpus = GpuLease()

    def _free_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            self._leases.release(port)
