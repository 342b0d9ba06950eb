"""Starts and stops vLLM servers, on CPU and GPU by the same code, whatever interpreter vLLM lives in.

    ServerSpec + PortLease (+ GPUs) ──▶ start_server ──▶ VLLMServer ── wait_ready ─ require ─ … ─ stop
                                            │
                      supervisor ─▶ API server ─▶ EngineCore ─▶ workers      log: LOOPWRIGHT_HOME/servers/<name>/log

The server listens on loopback with a random key of its own, wanted on every path but /health. The key travels in the
environment only: never on a command line, in a log or in the registry.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.errors import ModelNotFound, PortTaken, ServerStartFailed, ServerUnreachable
from infra.home import home
from infra.leases import PortLease, visible_gpus
from infra.process import Supervised
from infra.vllm_probe import BACKEND, Capabilities, Needs, lacking, probe, request, require

__all__ = [
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

PLUGIN = Path(__file__).parent / "vllm_plugin"
SERVED_NAME = "policy"
POLL_S = 0.5
PROGRESS_S = 10.0
# "(EngineCore pid=12) INFO 11-29 16:25:40 [core.py:133] "
LOG_PREFIX = re.compile(r"^(\(.*? pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ )?(\[\S+:\d+\] )?")
# Set by torchrun for the trainer's ranks; a server that inherits them would join their process group.
RANK_VARIABLES = re.compile(r"(RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)$")


@dataclass(frozen=True)
class ServerSpec:
    """`device=None`: cuda when there is a GPU to use, else cpu. `extra_args` come last, so they override what is chosen here;
    `name` names the log folder, so give each running server its own.

    `weight_dirs`: folders that weight updates may be read from; empty: what the trainer names when it connects.
    """

    model: str
    name: str = "student"
    python: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    dtype: str | None = None
    max_logprobs: int = 20  # most log-probabilities per token a request may ask for
    sampling_mask: bool = False  # return the ids each token was sampled among (GPU only); every request must then set top_k
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    weight_dirs: tuple[str, ...] = ()

    @property
    def resolved_device(self) -> Literal["cpu", "cuda"]:
        return self.device or ("cuda" if visible_gpus() else "cpu")


def check_model(model: str) -> None:
    """ModelNotFound when `model` is a path without a model in it. A hub id (`name` or `org/name`) passes unchecked."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no model: it has no config.json")
    elif path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists():
        raise ModelNotFound(f"model folder {path} does not exist")


def command_line(spec: ServerSpec, port: int, host: str = "127.0.0.1") -> list[str]:
    """The server's arguments; the same on CPU and GPU but for what only one of them knows."""
    device = spec.resolved_device
    arguments = [spec.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", str(Path(spec.model).expanduser()) if spec.model.startswith("~") else spec.model]
    arguments += ["--served-model-name", SERVED_NAME, "--host", host, "--port", str(port), "--seed", str(spec.seed)]
    # Sampling is the run's business: what a model's generation_config.json says must not slip in.
    arguments += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    arguments += ["--max-logprobs", str(spec.max_logprobs)]
    arguments += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    arguments += ["--worker-extension-cls", "loopwright_vllm.worker.WorkerExtension"]
    arguments += ["--middleware", "loopwright_vllm.auth.KeyMiddleware", "--disable-uvicorn-access-log"]
    arguments += ["--dtype", spec.dtype or ("float32" if device == "cpu" else "bfloat16")]
    arguments += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.max_model_len is not None:
        arguments += ["--max-model-len", str(spec.max_model_len)]
    if spec.sampling_mask:
        arguments.append("--return-sampling-mask")
    if device == "cpu":
        # Chunked prefill and per-request seeds together kill the CPU engine ("CPU Generator does not use offset").
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*arguments, *spec.extra_args]


def environment(spec: ServerSpec, key: str, gpus: Sequence[int] = ()) -> dict[str, str]:
    """The server's whole environment."""
    env = {name: value for name, value in os.environ.items() if not RANK_VARIABLES.match(name)}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if spec.resolved_device == "cpu":
        # Without "nobind" every worker would bind to core 0.
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
        # The trainer runs on the same cores: threads that spin while they wait would take them from it.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    if spec.weight_dirs:
        env["LOOPWRIGHT_WEIGHT_DIRS"] = os.pathsep.join(str(Path(folder).absolute()) for folder in spec.weight_dirs)
    env |= spec.env
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), env.get("PYTHONPATH")]))
    if plugins := env.get("VLLM_PLUGINS"):
        env["VLLM_PLUGINS"] = f"{plugins},loopwright"
    env["VLLM_API_KEY"] = key
    return env


@dataclass
class VLLMServer:
    """A server this process owns: when this process goes, it goes. `process.pid` is its API server."""

    spec: ServerSpec
    url: str
    api_key: str = field(repr=False)
    process: Supervised
    log_path: Path
    _capabilities: Capabilities | None = None

    def alive(self) -> bool:
        return self.process.poll() is None

    def describe_exit(self) -> str:
        return self.process.describe_exit()

    def wait_ready(self, timeout_s: float = 900.0, on_progress: Callable[[str], None] | None = None) -> None:
        """Blocks until it answers, with its key, and has generated one token (the first request of all compiles kernels).

        `on_progress` gets a line every ten seconds. ServerStartFailed when it ends or the time is up; PortTaken when
        something else answers on its port.
        """
        started = shown = time.monotonic()
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
        # A server that returns candidate sets refuses a request without top_k.
        sampling = {"max_tokens": 2, "seed": 0, "logprobs": 0, "ignore_eos": True, "top_k": 1}
        body = {"token_ids": [0], "sampling_params": sampling}
        answer = request(self.url, self.api_key, "/inference/v1/generate", method="POST", json=body, timeout=timeout_s)
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
) -> VLLMServer:
    """Start a server on a leased port and, on a GPU machine, leased devices; returns at once (see `VLLMServer.wait_ready`).

    ModelNotFound before anything is started, ServerStartFailed when the interpreter cannot be; ValueError when the devices do
    not fit the spec.
    """
    check_model(spec.model)
    if spec.resolved_device == "cuda" and len(gpus) < spec.tensor_parallel_size:
        raise ValueError(f"tensor_parallel_size={spec.tensor_parallel_size} needs as many GPUs, {len(gpus)} are leased")
    key = key or secrets.token_urlsafe(32)
    log_path = log_path or home() / "servers" / spec.name / "log"
    command = command_line(spec, port.port, port.host)
    try:
        process = Supervised.start(command, environment(spec, key, gpus), log_path, port.id, owner=owner)
    except OSError as error:
        raise ServerStartFailed(f"server {spec.name} could not be started: {error}", "user") from error
    return VLLMServer(spec, f"http://{port.host}:{port.port}", key, process, log_path)


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
