"""The student server of a run: started on leased port and devices, or one that is given by its URL."""

from __future__ import annotations

import os
from typing import Any

from flows.config import GRPORunConfig
from flows.convert import resolve_model
from infra.home import home
from infra.leases import GpuLease, LeaseManager, PortLease, visible_gpus
from infra.registry import Registry, RunRow
from infra.vllm import Needs, ServerSpec, VLLMServer, lacking, probe, start_server
from trainers.errors import ServerCapabilityError
from trainers.references import resolve


def needs(config: GRPORunConfig) -> Needs:
    """What the run asks of its student: room for at least one prompt token before the longest completion, and its logprobs."""
    return Needs(max_model_len=config.max_completion_length + 1, max_logprobs=config.server_logprobs)


class Student:
    """`flows.training.Servers` for one student."""

    def __init__(self, config: GRPORunConfig, run: RunRow, registry: Registry, leases: LeaseManager) -> None:
        self._config, self._run, self._registry, self._leases = config, run, registry, leases
        self._given = config.servers.student
        self._gpus = GpuLease()
        self._port: PortLease | None = None
        self._server: VLLMServer | None = None
        self._row_id = ""
        self._details: dict[str, Any] = {}

    def lease(self) -> None:
        """Devices for the run's whole life; the port is leased with each start.

        Raises:
            NotEnoughGPUs: fewer are free.
        """
        wanted = self._given.gpus
        if self._given.url is None:
            count = (self._given.tensor_parallel_size if visible_gpus() else 0) if wanted is None else wanted
            self._gpus = self._leases.lease_gpus(count, self._run.id)

    def ensure(self) -> None:
        """A server that is up and can do what the run needs: the one there is, else a new one.

        Raises:
            InfraError: it did not start, or lacks something.
        """
        if self._given.url is not None:
            url, key = resolve(self._given.url), os.environ.get(self._given.api_key_env)
            missing = lacking(found := probe(url, key), needs(self._config))
            if missing:
                raise ServerCapabilityError(f"the vLLM server at {url} cannot do what this run needs: {'; '.join(missing)}")
            self._details = {"name": "student", "url": url, "model": found.model, "version": found.version, "log": ""}
            return
        if self._server is not None and self._server.alive():
            return
        self.stop()
        self._port = self._leases.lease_port(self._run.id)
        log = home() / "servers" / self._run.name / "student.log"
        server = start_server(self._spec(), self._port, self._gpus.devices, log_path=log)
        self._server = server
        self._row_id = self._registry.record_server(
            self._run.id, "student", server.url, server.process.pid, lease_id=self._port.id, log_path=str(log)
        ).id
        try:
            server.wait_ready(self._config.vllm_server_timeout, on_progress=print)
            server.require(needs(self._config))
        except BaseException:
            self.stop()
            raise
        found = server.capabilities()
        self._details = {
            "name": "student", "url": server.url, "model": found.model, "version": found.version,
            "max_model_len": found.max_model_len, "device": found.device, "log": str(log),
        }  # fmt: skip

    def _spec(self) -> ServerSpec:
        given = self._given
        return ServerSpec(
            model=resolve_model(resolve(self._config.model)),
            python=resolve(given.python),
            device="cuda" if self._gpus.devices else "cpu",
            tensor_parallel_size=given.tensor_parallel_size,
            max_model_len=given.max_model_len,
            dtype=given.dtype,
            max_logprobs=max(self._config.server_logprobs, ServerSpec.max_logprobs),
            # No CPU server can; the run goes on with a warning that the ratio is biased.
            sampling_mask=bool(self._gpus.devices) and self._config.restricts_sampling,
            extra_args=tuple(resolve(given.extra_args)),
            env=resolve(given.env),
            seed=self._config.seed,
        )

    def death(self) -> str | None:
        """How the server died and the end of its log. One given by URL is only seen from outside: unreachable is not dead."""
        if self._server is None or self._server.alive():
            return None
        how = self._server.describe_exit()
        self._registry.end_server(self._row_id, how)
        return f"vLLM server student died: {how}\nend of {self._server.log_path}:\n{self._server.process.log_tail(15)}"

    def config_fields(self) -> dict[str, Any]:
        return {"vllm_server_base_url": self._details["url"]}

    def environment(self) -> dict[str, str]:
        key = self._server.api_key if self._server is not None else os.environ.get(self._given.api_key_env, "")
        return {"VLLM_API_KEY": key}

    def rows(self) -> list[dict[str, Any]]:
        return [self._details] if self._details else []

    def stop(self) -> None:
        """Stop what was started and free its port; the devices stay leased."""
        if self._server is not None:
            self._server.stop()
            self._registry.end_server(self._row_id, self._server.describe_exit())
            self._server = None
        if self._port is not None:
            self._leases.release(self._port)
            self._port = None
