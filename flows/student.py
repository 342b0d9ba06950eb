"""One student server that a run starts: its place in the run has GPUs, each start has a port and a process of its own.

    Student (place, GPUs) ── start ─▶ port lease ─▶ process ─▶ ready and able ── … ── died ─▶ stop ─▶ start again

Starting blocks and has a thread of its own in `flows.students`; `stop` may come from another thread meanwhile, and ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.config import GRPORunConfig
from flows.convert import resolve_model
from infra.home import home
from infra.leases import GpuLease, LeaseManager, PortLease, visible_gpus
from infra.registry import Registry, RunRow
from infra.vllm import Needs, ServerSpec, VLLMServer, start_server
from trainers.references import resolve

STARTING_GRACE_S = 1.0


def needs(config: GRPORunConfig) -> Needs:
    """What the run asks of its student: room for at least one prompt token before the longest completion, and its logprobs."""
    return Needs(max_model_len=config.max_completion_length + 1, max_logprobs=config.server_logprobs)


class Student:
    """A place for one server. `key` is wanted by the server, and known to the trainer."""

    def __init__(
        self, config: GRPORunConfig, run: RunRow, registry: Registry, leases: LeaseManager, name: str, key: str
    ) -> None:
        self.name = name
        self._config, self._run, self._registry, self._leases, self._key = config, run, registry, leases, key
        self._given = config.servers.student
        self._gpus = GpuLease()
        self._port: PortLease | None = None
        self._server: VLLMServer | None = None
        self._row_id = ""
        self._details: dict[str, Any] = {}

    def lease(self) -> None:
        """Devices for as long as the place is kept; the port is leased with each start.

        Raises:
            NotEnoughGPUs: fewer are free.
        """
        wanted = self._given.gpus
        count = (self._given.gpus_needed if visible_gpus() else 0) if wanted is None else wanted
        self._gpus = self._leases.lease_gpus(count, self._run.id, "student")

    def start(self, say: Callable[[str], None]) -> None:
        """Returns when the server is up and can do what the run needs; `say` is told how it goes.

        Raises:
            InfraError: it did not start, or lacks something; nothing of it is left.
        """
        self._port = self._leases.lease_port(self._run.id)
        log = home() / "servers" / self._run.name / f"{self.name}.log"
        try:
            port = self._port
            server = start_server(self._spec(), port, self._gpus.devices, key=self._key, log_path=log)
            self._server = server
            self._row_id = self._registry.record_server(
                self._run.id, self.name, server.url, server.process.pid, lease_id=port.id, log_path=str(log)
            ).id
            server.wait_ready(self._config.vllm_server_timeout, on_progress=say)
            server.require(needs(self._config))
            found = server.capabilities()
        except BaseException:
            self.stop()
            raise
        self._details = {
            "name": self.name, "url": server.url, "model": found.model, "version": found.version,
            "max_model_len": found.max_model_len, "device": found.device, "log": str(log),
        }  # fmt: skip

    def _spec(self) -> ServerSpec:
        given, adapters = self._given, self._config.adapter_serving
        return ServerSpec(
            model=resolve_model(resolve(self._config.model)),
            name=self.name,
            python=resolve(given.python),
            device="cuda" if self._gpus.devices else "cpu",
            tensor_parallel_size=given.tensor_parallel_size,
            max_model_len=given.max_model_len,
            dtype=given.dtype,
            top_logprobs=self._config.server_logprobs - 1,
            # Where no server can, the run goes on with a warning that the ratio is biased.
            sampling_mask=self._config.restricts_sampling,
            max_lora_rank=adapters.max_lora_rank if adapters else None,
            max_loras=adapters.max_loras if adapters else ServerSpec.max_loras,
            concurrent=self._config.max_concurrent_rollouts,
            extra_args=tuple(resolve(given.extra_args)),
            env=resolve(given.env),
            seed=self._config.seed,
        )

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
        """Stop what was started and free its port; the devices stay leased."""
        ready, self._details = bool(self._details), {}
        # Taken at once: a start that is given up in its thread ends here too.
        server, self._server = self._server, None
        if server is not None:
            # One that is still starting has nothing to finish, and may not listen to SIGTERM before it is done.
            server.stop(None if ready else STARTING_GRACE_S)
            self._registry.end_server(self._row_id, server.describe_exit())
        port, self._port = self._port, None
        if port is not None:
            self._leases.release(port)

    def give_up(self) -> None:
        """Stop it and free its devices."""
        self.stop()
        self._leases.release(self._gpus)
        self._gpus = GpuLease()
