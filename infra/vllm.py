"""Starts and stops vLLM servers, on CPU and GPU by the same code, whatever interpreter vLLM lives in.

    ServerSpec + PortLease (+ GPUs) ──▶ start_server ──▶ VLLMServer ── wait_ready ─ require ─ … ─ stop
                                            │
                      supervisor ─▶ API server ─▶ EngineCore ─▶ workers      log: LOOPWRIGHT_HOME/servers/<name>/log

The server listens on loopback with a random key of its own, wanted on every path but /health. The key travels in the
environment only: never on a command line, in a log or in the registry.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import ModelNotFound, PortTaken, ServerStartFailed, ServerUnreachable
from infra.home import home
from infra.leases import PortLease
from infra.process import Supervised
from infra.vllm_command import PLUGIN, ServerSpec, command_line, environment, front_of
from infra.vllm_features import Features, installed
from infra.vllm_front import Choice
from infra.vllm_probe import GENERATE, Capabilities, Needs, lacking, probe, request, require

__all__ = [
    "PLUGIN",
    "Capabilities",
    "Needs",
    "ServerSpec",
    "VLLMServer",
    "command_line",
    "environment",
    "lacking",
    "probe",
    "start_server",
]

logger = logging.getLogger(__name__)
POLL_S = 0.5
PROGRESS_S = 10.0
# "(EngineCore pid=12) INFO 11-29 16:25:40 [core.py:133] "
LOG_PREFIX = re.compile(r"^(\(.*? pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ )?(\[\S+:\d+\] )?")


def check_model(model: str) -> None:
    """ModelNotFound when `model` is a path without a model in it. A hub id (`name` or `org/name`) passes unchecked."""
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            remedy = f"make it a model with `python -m trainers.export {path} FOLDER --merge`"
            raise ModelNotFound(f"{path} holds an adapter: {remedy}")
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no model: it has no config.json")
    elif path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists():
        raise ModelNotFound(f"model folder {path} does not exist")


@dataclass
class VLLMServer:
    """A server this process owns: when this process goes, it goes. `process.pid` is its API server."""

    spec: ServerSpec
    url: str
    api_key: str = field(repr=False)
    process: Supervised
    log_path: Path
    front: Choice = field(default_factory=Choice)
    _capabilities: Capabilities | None = None

    def alive(self) -> bool:
        return self.process.poll() is None

    def describe_exit(self) -> str:
        return self.process.describe_exit()

    def wait_ready(self, timeout_s: float = 900.0, on_progress: Callable[[str], None] | None = None) -> None:
        """Blocks until it answers, with its key, and has generated one token (the first request of all compiles kernels).

        `on_progress` gets a line every ten seconds. ServerStartFailed when it ends, the time is up, or it wants no key;
        PortTaken when something else answers on its port.
        """
        started = shown = time.monotonic()
        if on_progress is not None:
            on_progress(f"{self.spec.name}: starting; {'; '.join(self.front.reasons)}")
        while not self._answers():
            now = time.monotonic()
            if not self.alive():
                raise start_failure(self)
            if now - started > timeout_s:
                self.stop(grace_s=1.0)
                raise ServerStartFailed(
                    f"server {self.spec.name} was not ready after {timeout_s:.0f} s; its log: {self.log_path}"
                )
            if on_progress is not None and now - shown >= PROGRESS_S:
                shown = now
                line = LOG_PREFIX.sub("", self.process.log_tail(1)).strip()
                on_progress(f"{self.spec.name}: starting, {now - started:.0f} s: {line[:100]}")
            time.sleep(POLL_S)
        found = self.capabilities()
        if not found.keyed:
            why = "answers without its key, so that anybody could change its weights: it is not used"
            raise ServerStartFailed(f"server {self.spec.name} {why}", "user")
        # A server that returns candidate sets refuses a request without top_k.
        sampling = {"max_tokens": 2, "seed": 0, "logprobs": 0, "ignore_eos": True, "top_k": 1}
        body = {"model": found.served_name, "token_ids": [0], "sampling_params": sampling}
        answer = request(self.url, self.api_key, GENERATE, method="POST", json=body, timeout=timeout_s)
        if answer.status_code != 200:
            raise ServerStartFailed(f"server {self.spec.name} is up but does not generate: {answer.text[:500]}")
        if on_progress is not None:
            on_progress(f"{self.spec.name}: ready after {time.monotonic() - started:.0f} s at {self.url}")

    def _answers(self) -> bool:
        try:
            if request(self.url, None, "/health", timeout=5.0).status_code != 200:
                return False
        except ServerUnreachable:
            return False
        try:
            if request(self.url, self.api_key, "/version").status_code == 200:
                return True
        except ServerUnreachable:
            if not self.alive():
                return False  # the caller tells how it ended
        raise PortTaken(f"something else than server {self.spec.name} answers at {self.url}: its key is not accepted there")

    def capabilities(self) -> Capabilities:
        """What it says of itself; asked once."""
        if self._capabilities is None:
            self._capabilities = probe(self.url, self.api_key)
        return self._capabilities

    def require(self, needs: Needs) -> None:
        """ServerLacks naming the flags to add."""
        require(self.url, self.capabilities(), needs)

    def stop(self, grace_s: float | None = None) -> None:
        """Ends it and everything it started. Harmless when it has ended."""
        self.process.stop(grace_s)


def start_server(
    spec: ServerSpec,
    port: PortLease,
    gpus: Sequence[int] = (),
    key: str | None = None,
    owner: tuple[int, float] | None = None,
    log_path: Path | None = None,
    features: Features | None = None,
) -> VLLMServer:
    """Start a server on a leased port and, on a GPU machine, leased devices; returns at once (see `VLLMServer.wait_ready`).

    `features`: of the vLLM that will run; None: looked up.

    ModelNotFound before anything is started, ServerStartFailed when the interpreter cannot be or has no vLLM, ServerLacks when
    the spec asks for what that vLLM cannot do; ValueError when the devices do not fit the spec.
    """
    check_model(spec.model)
    if spec.resolved_device == "cuda" and len(gpus) < spec.tensor_parallel_size:
        raise ValueError(f"tensor_parallel_size={spec.tensor_parallel_size} needs as many GPUs, {len(gpus)} are leased")
    key = key or secrets.token_urlsafe(32)
    log_path = log_path or home() / "servers" / spec.name / "log"
    features = features or installed(spec.python, spec.env)
    front = front_of(spec, features)
    for reason in front.reasons:
        logger.info("server %s, vLLM %s: %s", spec.name, features.version, reason)
    command = command_line(spec, port.port, features, front, port.host)
    try:
        process = Supervised.start(command, environment(spec, key, gpus, front), log_path, port.id, owner=owner)
    except OSError as error:
        raise ServerStartFailed(f"server {spec.name} could not be started: {error}", "user") from error
    return VLLMServer(spec, f"http://{port.host}:{port.port}", key, process, log_path, front)


def start_failure(server: VLLMServer) -> Exception:
    """Reads from the log of a server that ended why it did."""
    text = server.process.log_tail(400)
    if "address already in use" in text.lower():
        return PortTaken(f"server {server.spec.name} could not bind {server.url}: another process took the port")
    # Later errors are mostly "engine core failed": the cause is the first one of the last start.
    errors = re.findall(r"^.*?\b((?:\w+\.)*\w*(?:Error|Exception): .+|error: .+)$", text, re.MULTILINE)
    cause = errors[0].strip() if errors else server.process.log_tail(3)
    failure_class = "infrastructure"
    if re.search(r"out of memory|No available memory|Cannot allocate memory|larger than the available KV cache memory", text):
        failure_class = "memory"
    elif (server.process.returncode or 0) > 0:
        failure_class = "user"  # it refused its arguments or the model; a signal would be somebody else's doing
    return ServerStartFailed(
        f"server {server.spec.name} ended before it was ready ({server.describe_exit()}): {cause}\nits log: {server.log_path}",
        failure_class,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m infra.vllm serve MODEL …`."""
    from infra.vllm_serve import main as serve

    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
