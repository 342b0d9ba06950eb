"""The command line and environment of a vLLM server, from what a run asks for and what the installation can do.

    ServerSpec + Features ─▶ choose (front end, processes) ─▶ command_line, environment

Plain functions of the standard library: whoever starts a server uses them, with leases (`infra.vllm`) or without.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from infra.gpus import visible_gpus
from infra.vllm_features import Features
from infra.vllm_front import COUNT_FLAGS, RUST_ENV, Asks, Choice, FrontEnd, choose, given_processes, python_only, takes_adapters

BACKEND = "loopwright"
PLUGIN = Path(__file__).parent / "vllm_plugin"
SERVED_NAME = "policy"
# An evaluation may ask for more at once than training does; beyond the upper bound requests only wait in another place.
SEQUENCES = (64, 1024)
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
    top_logprobs: int = 0  # log-probabilities per token that requests ask for beside the sampled one's
    max_logprobs: int = 20  # most that a request may ask for; -1: no bound
    sampling_mask: bool = False  # return the ids each token was sampled among (GPU only); every request must then set top_k
    max_lora_rank: int | None = None  # adapters may be loaded while it serves, up to this rank; None: none
    max_loras: int = 1  # adapters that requests of one moment may name
    concurrent: int | None = None  # requests that will be in flight at once; None: vLLM's own bound
    front_end: FrontEnd = "auto"
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    weight_dirs: tuple[str, ...] = ()
    frozen: bool = False  # its weights stay as they are, so it has no endpoint that changes them

    @classmethod
    def teacher(cls, model: str, **fields: Any) -> ServerSpec:
        """Of a server that only scores: any number of log-probabilities of a prompt's tokens, and weights that stay."""
        return cls(model, **{"max_logprobs": -1, "frozen": True, **fields})

    @property
    def resolved_device(self) -> Literal["cpu", "cuda"]:
        return self.device or ("cuda" if visible_gpus() else "cpu")


def front_of(spec: ServerSpec, features: Features, cores: int | None = None) -> Choice:
    """Front end and process count of a server; `cores`: what this process may use.

    Raises:
        ServerLacks: the user asked for what cannot be.
    """
    front_end = spec.front_end
    if RUST_ENV in spec.env:
        front_end = "rust" if spec.env[RUST_ENV] == "1" else "python"
    asks = Asks(
        device=spec.resolved_device,
        scores=spec.frozen,
        sampling_mask=spec.sampling_mask,
        adapters=spec.max_lora_rank is not None or takes_adapters(spec.extra_args),
        front_end=front_end,
        api_processes=given_processes(spec.extra_args),
        python_only=python_only(spec.extra_args, spec.model),
    )
    return choose(asks, features, cores or len(os.sched_getaffinity(0)))


def command_line(spec: ServerSpec, port: int, features: Features, front: Choice, host: str = "127.0.0.1") -> list[str]:
    """The server's arguments; the same on CPU and GPU but for what only one of them knows."""
    device = spec.resolved_device
    arguments = [spec.python or sys.executable, "-m", "loopwright_vllm.serve"]
    arguments.append(str(Path(spec.model).expanduser()) if spec.model.startswith("~") else spec.model)
    arguments += ["--served-model-name", SERVED_NAME, "--host", host, "--port", str(port), "--seed", str(spec.seed)]
    most = -1 if spec.max_logprobs == -1 else max(spec.max_logprobs, spec.top_logprobs + 1)
    arguments += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(most)]
    if not spec.frozen:
        arguments += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        arguments += ["--worker-extension-cls", "loopwright_vllm.worker.WorkerExtension"]
    if features.takes("enable_scale_out"):
        arguments.append("--enable-scale-out")  # before it was an option, /inference/v1/generate was always there
    if not front.rust:
        # Sampling is the run's business: what a model's generation_config.json says must not slip in.
        arguments += ["--generation-config", "vllm"]
        arguments += ["--middleware", "loopwright_vllm.auth.KeyMiddleware", "--disable-uvicorn-access-log"]
        if front.api_processes > 1:
            arguments += [COUNT_FLAGS[0], str(front.api_processes)]
    arguments += ["--dtype", spec.dtype or ("float32" if device == "cpu" else "bfloat16")]
    arguments += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.max_model_len is not None:
        arguments += ["--max-model-len", str(spec.max_model_len)]
    if spec.concurrent is not None:
        low, high = SEQUENCES
        arguments += ["--max-num-seqs", str(max(low, min(high, (spec.concurrent + 7) // 8 * 8)))]
    if spec.max_lora_rank is not None:
        arguments += ["--enable-lora", "--max-lora-rank", str(spec.max_lora_rank), "--max-loras", str(spec.max_loras)]
    if front.sampling_mask:
        arguments.append("--return-sampling-mask")
    if device == "cpu":
        # Chunked prefill and per-request seeds together kill the CPU engine ("CPU Generator does not use offset").
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*arguments, *spec.extra_args]


def environment(spec: ServerSpec, key: str, gpus: Sequence[int] = (), front: Choice | None = None) -> dict[str, str]:
    """The server's whole environment."""
    env = {name: value for name, value in os.environ.items() if not RANK_VARIABLES.match(name)}
    env |= {"VLLM_SERVER_DEV_MODE": "0" if spec.frozen else "1", "VLLM_NO_USAGE_STATS": "1"}
    if spec.resolved_device == "cpu":
        # Without "nobind" every worker would bind to core 0.
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
        # The trainer runs on the same cores: threads that spin while they wait would take them from it.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    if spec.weight_dirs:
        env["LOOPWRIGHT_WEIGHT_DIRS"] = os.pathsep.join(str(Path(folder).absolute()) for folder in spec.weight_dirs)
    if spec.max_lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if spec.tensor_parallel_size > 1:
            env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    env |= spec.env
    env[RUST_ENV] = "1" if front is not None and front.rust else "0"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), env.get("PYTHONPATH")]))
    if plugins := env.get("VLLM_PLUGINS"):
        env["VLLM_PLUGINS"] = f"{plugins},loopwright"
    env["VLLM_API_KEY"] = key.strip()
    return env
