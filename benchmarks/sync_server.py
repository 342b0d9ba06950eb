"""What the weight sync benchmark runs against: a random model, a vLLM server of its own, and requests that never stop.

Written for machines that have torch, transformers and vLLM and nothing of the flows: the server is started without them.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

PLUGIN = Path(__file__).parents[1] / "infra" / "vllm_plugin"
START_TIMEOUT_S = 420.0


def make_model(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, folder: Path) -> PreTrainedModel:
    """A Qwen3 of this shape with random weights, wide enough that other weights give other text; also written to `folder`."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary = shape
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192 if vocabulary > 1000 else 512,
        tie_word_embeddings=True,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
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


def vllm_has(text: str) -> bool:
    """Whether vLLM's sources speak of an argument of this name; looked up without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise SystemExit("vLLM is not importable here: put it on PYTHONPATH, or give --server URL")
    root = Path(next(iter(places)))
    return any(text in path.read_text() for path in (root / "entrypoints").rglob("*.py"))


@dataclass
class Server:
    """A vLLM server; `process` None: somebody else's."""

    url: str
    key: str
    model: Path
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @classmethod
    def start(cls, backend: str, model: Path, work_dir: Path, gpu: int, extra: list[str]) -> Server:
        """`backend`: of weight transfer, ours or vLLM's."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        key, log = secrets.token_urlsafe(24), work_dir / f"server-{backend}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
        command += ["--weight-transfer-config", json.dumps({"backend": backend})]
        command += ["--worker-extension-cls", "loopwright_vllm.worker.WorkerExtension"] if backend == "loopwright" else []
        command += ["--middleware", "loopwright_vllm.auth.KeyMiddleware"]
        command += ["--enable-scale-out"] if vllm_has("enable_scale_out") else []
        env = dict(os.environ) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": key}
        env |= {"HF_HUB_OFFLINE": "1"}
        if torch.cuda.is_available():
            command += ["--dtype", "bfloat16", "--max-model-len", "8192", "--gpu-memory-utilization", "0.28"]
            command += ["--kv-cache-memory-bytes", "24G", "--max-num-seqs", "256"]
            env |= {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
            # vLLM's own ipc engine unpickles what it is sent.
            env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if backend == "ipc" else {}
        else:
            command += ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", "--max-model-len", "512"]
            env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "PASSIVE"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), str(_ray(work_dir)), env.get("PYTHONPATH")]))
        with log.open("wb") as out:
            process = subprocess.Popen([*command, *extra], env=env, stdout=out, stderr=out, start_new_session=True)
        return cls(f"http://127.0.0.1:{port}", key, model, process, log)

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


def _ray(work_dir: Path) -> Path:
    """vLLM 0.26's ipc engine imports ray at its top and uses it for Ray alone: an empty module will do where there is none."""
    folder = work_dir / "modules"
    folder.mkdir(exist_ok=True)
    if importlib.util.find_spec("ray") is None:
        (folder / "ray.py").touch()
        sys.path.append(str(folder))
    return folder


class Load:
    """Requests in flight while open, a new one for each that ends. `finish` waits for the last ones and counts."""

    def __init__(self, url: str, key: str, count: int, vocabulary: int) -> None:
        self.url, self.key, self.vocabulary = url, key, vocabulary
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
                try:
                    answer = client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling})
                    choice = answer.raise_for_status().json()["choices"][0]
                    self.results.append(choice["finish_reason"] if len(choice["token_ids"]) == 200 else "too short")
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.results.append(f"{type(error).__name__}: {error}"[:200])
