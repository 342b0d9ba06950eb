"""Flow `serve`: a vLLM server that is kept by a name, for other runs to use, until it is cancelled or its time is up.

    lease (name, GPUs, port) ─▶ start ─▶ ready, listed ─▶ … died: again at the same address, so often in all ─▶ ended

A run names it by `servers.student.url: name:X`; any number of runs name a teacher by `servers.teachers.NAME.url: name:X`. The
port stays leased over restarts: a run that uses the server goes on with it once it answers again, and gives a student its
weights anew.
"""

from __future__ import annotations

import time
from typing import Any

from prefect import flow
from prefect.states import Failed
from pydantic import ConfigDict, Field, field_validator

from flows import artifacts
from flows.config import GRPORunConfig
from flows.config_servers import ServerConfig
from flows.convert import resolve_model
from flows.failures import RunFailed, describe, failure_of
from flows.reaping import begin_flow
from flows.started_server import common_spec
from infra.errors import InfraError
from infra.gpus import visible_gpus
from infra.leases import LeaseManager, PortLease
from infra.registry import Registry
from infra.server_names import NAME, holding, key_for, record, usage_of
from infra.vllm import ServerSpec, VLLMServer, start_server
from trainers.config import StrictModel
from trainers.config_base import number_fields
from trainers.errors import LoopwrightError
from trainers.references import resolve

LOOK_S = 1.0


class ServeConfig(StrictModel):
    """A server to keep."""

    model_config = ConfigDict(json_schema_extra=number_fields)

    name: str = Field(description="By which runs find it: servers.student.url=name:NAME.")
    model: str = Field(description="Folder with a Hugging Face model, or a hub id.")
    ttl_s: float | None = Field(
        default=None, gt=0, description="Seconds after which it is ended. Default none: kept until cancelled."
    )
    server: ServerConfig = Field(default_factory=ServerConfig, description="How it is started.")
    teacher: bool = Field(
        default=False,
        description="For scoring only, by any number of runs: all logprobs may be asked for, weights cannot be changed. "
        "Default false.",
    )
    top_logprobs: int = Field(
        default=GRPORunConfig.model_fields["num_sampler_logprobs"].default,
        ge=0,
        description="Log-probabilities per token that runs ask for beside the sampled one's. Default 8.",
    )
    concurrent: int | None = Field(default=None, ge=1, description="Requests in flight at once. Default: vLLM's own bound.")
    ready_s: float = Field(default=1800.0, gt=0, description="Seconds to wait for it to be ready. Default 1800.")
    restarts: int = Field(default=3, ge=0, description="How often it is started again after it died. Default 3.")

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not NAME.match(name):
            raise ValueError("letters, digits, `_`, `-` and `.`, at most 64, the first a letter or digit")
        return name

    @field_validator("server")
    @classmethod
    def _starts_one(cls, server: ServerConfig) -> ServerConfig:
        if server.url is not None:
            raise ValueError("`url` names a server that is up; this flow starts one: leave it out")
        return server


class KeptServer:
    """The server of one flow run and how it is started again."""

    def __init__(self, config: ServeConfig, registry: Registry, leases: LeaseManager) -> None:
        self.config, self._registry, self._leases = config, registry, leases
        self._gpus = leases.lease_gpus(config.server.gpus_leased(bool(visible_gpus())))
        self._port: PortLease = leases.lease_port()
        self._key, self._where_key = key_for(config.name)
        self._server: VLLMServer | None = None
        self._row_id = ""

    def start(self) -> VLLMServer:
        """Returns when it is ready.

        Raises:
            InfraError: it did not get so; nothing of it is left.
        """
        server = self._server = start_server(self._spec(), self._port, self._gpus.devices, key=self._key)
        try:
            server.wait_ready(self.config.ready_s, on_progress=lambda line: print(line, flush=True))
        except BaseException:
            self.stop()
            raise
        self._row_id = record(self._registry, server, self._port.id, self._where_key).id
        return server

    def _spec(self) -> ServerSpec:
        make = ServerSpec.teacher if self.config.teacher else ServerSpec
        return make(
            model=resolve_model(resolve(self.config.model)),
            top_logprobs=self.config.top_logprobs,
            concurrent=self.config.concurrent,
            **common_spec(self.config.server, self.config.name, self._gpus),
        )

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            if self._row_id:
                self._registry.end_server(self._row_id, server.describe_exit())


@flow(name="serve", log_prints=True, persist_result=False)
def serve_model(config: ServeConfig) -> Any:
    """Keep a vLLM server by a name, for other runs to use, until this flow run is cancelled or its time is up.

    Args:
        config: the model, the server's settings, and for how long.
    """
    registry = begin_flow(config)
    try:
        with LeaseManager(registry) as leases, holding(leases, config.name):
            return keep(KeptServer(config, registry, leases))
    except (InfraError, LoopwrightError) as error:
        return Failed(message=describe(error), data=error)


def keep(kept: KeptServer) -> dict[str, Any]:
    """Until its time is up; what it was.

    Raises:
        RunFailed: it did not start, or died more often than it may be started again.
    """
    config = kept.config
    until = float("inf") if config.ttl_s is None else time.monotonic() + config.ttl_s
    left = config.restarts
    try:
        while True:
            server = kept.start()
            found = server.capabilities()
            artifacts.servers_table(
                [{"name": config.name, "url": server.url, "model": found.model, "log": str(server.log_path)}]
            )
            print(f"kept as {config.name} at {server.url}; runs name it by {usage_of(config.name, config.teacher)}")
            while server.alive():
                if time.monotonic() >= until:
                    return {"name": config.name, "url": server.url, "ended": f"ttl_s={config.ttl_s:g} is over"}
                time.sleep(LOOK_S)
            how = (
                f"server {config.name} died: {server.describe_exit()}\nend of {server.log_path}:\n{server.process.log_tail(15)}"
            )
            kept.stop()
            if not left:
                raise RunFailed("infrastructure", how)
            left -= 1
            print(f"{how}\nit is started again; {left} starts are left", flush=True)
    except InfraError as error:
        raise RunFailed(failure_of(error), describe(error)) from error
    finally:
        kept.stop()
