"""What the weight sync benchmark runs against: a random model, a vLLM server of its own, and requests that never stop.

Written for machines that have torch, transformers and vLLM and nothing of the flows: of provisioning, the command line is used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.shapes import qwen3_config
from infra.vllm_command import ServerSpec, command_line, environment, front_of
from infra.vllm_features import installed
from infra.vllm_front import Choice

POSITIONS, SHORT_POSITIONS = 8192, 512
# The models are small; the keys and values get a fixed part.
GPU_ARGUMENTS = ("--gpu-memory-utilization", "0.28", "--kv-cache-memory-bytes", "24G")
GPU_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
ONE_PROCESS = ("--api-server-count", "1")
START_TIMEOUT_S = 420.0


def make_model(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, folder: Path) -> PreTrainedModel:
    """A Qwen3 of this shape with random weights, wide enough that other weights give other text; also written to `folder`."""
    hidden, vocabulary = shape[1], shape[-1]
    config = qwen3_config(shape, POSITIONS if vocabulary > 1000 else SHORT_POSITIONS)
    torch.manual_seed(0)
    with device:
        # Not `.to(dtype)`, which would take the rotary frequencies along.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.1 if "embed" in name else 0.02 if hidden > 256 else 0.1)
    model.save_pretrained(folder)
    _tokenizer(vocabulary).save_pretrained(folder)
    return model


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(vocabulary - 2)} | {"<s>": vocabulary - 2, "</s>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@dataclass
class Server:
    """A vLLM server; `process` None: somebody else's."""

    url: str
    key: str
    model: Path
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @classmethod
    def start(cls, spec: ServerSpec, work_dir: Path, gpu: int) -> tuple[Server, Choice]:
        """One as provisioning starts it, and what was chosen for it. `gpu`: which of those that this process sees."""
        features = installed()
        chosen = front_of(spec, features)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        key, log = secrets.token_urlsafe(24), work_dir / f"server-{spec.name.replace(':', '-')}.log"
        visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        number = int(visible[gpu]) if visible else gpu
        env = environment(spec, key, [number] if spec.resolved_device == "cuda" else [], chosen)
        command = command_line(spec, port, features, chosen)
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        return cls(f"http://127.0.0.1:{port}", key, Path(spec.model), process, log), chosen

    def wait(self) -> None:
        """Until it is healthy. SystemExit with the end of its log when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            if (self.process is not None and self.process.poll() is not None) or time.monotonic() > deadline:
                raise SystemExit(f"the server at {self.url} did not start:\n{self.tail()}")
            time.sleep(0.5)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log is not None else ""

    def stop(self) -> None:
        """End it and what it started."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)


def server_spec(model: Path, name: str, extra: Sequence[str] = (), **changes: Any) -> ServerSpec:
    """What the benchmarks' servers have in common. On a GPU there is room for a trainer and for other servers beside one."""
    cuda = torch.cuda.is_available()
    return ServerSpec(
        str(model),
        name=name,
        device="cuda" if cuda else "cpu",
        max_model_len=POSITIONS if cuda else SHORT_POSITIONS,
        extra_args=(*(GPU_ARGUMENTS if cuda else ()), *extra),
        env={"HF_HUB_OFFLINE": "1"} | (GPU_ENV if cuda else {}) | changes.pop("env", {}),
        **changes,
    )


def stock_spec(model: Path, backend: str, work_dir: Path, extra: Sequence[str] = ()) -> ServerSpec:
    """One whose weight transfer is vLLM's own."""
    given = ["--weight-transfer-config", json.dumps({"backend": backend})]
    # vLLM's own ipc engine unpickles what it is sent.
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if backend == "ipc" else {}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ray(work_dir)), os.environ.get("PYTHONPATH")]))
    return server_spec(model, backend, [*given, *extra], front_end="python", env=env)


def _ray(work_dir: Path) -> Path:
    """vLLM 0.26's ipc engine imports ray at its top and uses it for Ray alone: an empty module will do where there is none."""
    folder = work_dir / "modules"
    folder.mkdir(exist_ok=True)
    if importlib.util.find_spec("ray") is None:
        (folder / "ray.py").touch()
        sys.path.append(str(folder))
    return folder


class Load:
    """Requests in flight while open, a new one for each that ends. `finish` waits for the last ones and counts.

    `model`: asked, for each request, which model it names; None: the server's own. `named`: by those in flight.
    """

    def __init__(self, url: str, key: str, count: int, vocabulary: int, model: Callable[[], str | None] = lambda: None) -> None:
        self.url, self.key, self.vocabulary, self.model = url, key, vocabulary, model
        self.named: dict[int, str | None] = {}
        self.stopping = threading.Event()
        self.results: list[str] = []
        self.threads = [threading.Thread(target=self._one, args=(index,), daemon=True) for index in range(count)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stopping.set()

    def finish(self) -> dict[str, Any]:
        self.stopping.set()
        for thread in self.threads:
            thread.join(300)
        failures = [result for result in self.results if result != "length"]
        return {
            "requests_ok": len(self.results) - len(failures),
            "requests_failed": len(failures),
            "failures": sorted(set(failures))[:3],
        }

    def _one(self, index: int) -> None:
        choose = random.Random(index)
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=300, trust_env=False) as client:
            while not self.stopping.is_set():
                prompt = [choose.randrange(self.vocabulary - 2) for _ in range(64)]
                sampling = {"max_tokens": 200, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
                body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling}
                self.named[index] = self.model()
                if self.named[index] is not None:
                    body["model"] = self.named[index]
                try:
                    answer = client.post("/inference/v1/generate", json=body)
                    choice = answer.raise_for_status().json()["choices"][0]
                    self.results.append(choice["finish_reason"] if len(choice["token_ids"]) == 200 else "too short")
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.results.append(f"{type(error).__name__}: {error}"[:200])
