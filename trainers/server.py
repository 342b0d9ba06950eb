"""The trainer's side of a vLLM server: control plane, weight updates, probe logprobs. Synchronous, rank 0 only.

Every call opens its own connection: after an error in the control plane the server drops the connection it came on. And every
call ends within its time, whatever answers: all ranks wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from trainers.adapters import AdapterFacts, version_of
from trainers.errors import ServerCapabilityError, ServerError

logger = logging.getLogger(__name__)
BACKEND = "loopwright"
SYNC_PATH = "/loopwright/sync"
CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 60.0  # for what a server answers without computing


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the trainer needs to know of a server. `dtype` is torch's name (`float32`, `bfloat16`).

    `workers`: what each worker says of itself (device, machine, version …); empty without our worker extension.
    `one_call`: it has our middleware, which does a whole weight sync in one call. `adapters`: None without `--enable-lora`.
    """

    model: str
    dtype: str
    max_model_len: int
    weight_backend: str | None
    workers: tuple[dict[str, Any], ...] = ()
    one_call: bool = False
    adapters: AdapterFacts | None = None


class ServerClient:
    """HTTP calls to one server. The key comes from `key` or the environment variable VLLM_API_KEY.

    Methods raise `ServerError` with the server's own message when it refuses, cannot be reached or does not answer in time.
    """

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._told = "None"
        self.timeout_s = timeout_s
        self.adapter: str | None = None  # the newest that was loaded; None: the policy is the model itself
        key = (key if key is not None else os.environ.get("VLLM_API_KEY", "")).strip()  # a mounted secret ends in a newline
        self.http = httpx.Client(
            base_url=self.url,
            headers={b"Authorization": f"Bearer {key}".encode()} if key else {},
            limits=httpx.Limits(max_keepalive_connections=0),
            # Loopback and private addresses: a proxy from the environment would only get in the way.
            trust_env=False,
        )

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        seconds = timeout_s or self.timeout_s
        limit = httpx.Timeout(seconds, connect=CONNECT_TIMEOUT_S)
        try:
            with _whole_within(seconds + CONNECT_TIMEOUT_S) as extensions:
                response = self.http.request(method, path, json=body, timeout=limit, extensions=extensions)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code == 401:
            raise ServerCapabilityError(f"{self.url} wants a key: set VLLM_API_KEY to the server's")
        if response.status_code >= 400:
            error = ServerError(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
            error.status = response.status_code
            raise error
        try:
            return response.json()
        except ValueError:
            return None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Of an answer: another program may have the port of a server that ended."""
        try:
            yield
        except ServerError:
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ServerError(f"what answers at {self.url} does not answer as a vLLM server does: {error!r}") from error

    def wait_healthy(self, timeout_s: float | None = None) -> None:
        """Wait until /health answers."""
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        told = False
        while True:
            try:
                self._call("GET", "/health", timeout_s=CONNECT_TIMEOUT_S)
                return
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"no healthy server at {self.url} within {timeout_s or self.timeout_s:.0f} s: {error}"
                    ) from error
                if not told:
                    logger.info("waiting for the server at %s", self.url)
                    told = True
                time.sleep(1.0)

    def facts(self) -> ServerFacts:
        """Raises `ServerCapabilityError` where the development endpoints are off."""
        try:
            info = self._call("GET", "/server_info?config_format=json")
        except ServerError as error:
            if error.status == 404:
                raise ServerCapabilityError(
                    f"{self.url} has no control endpoints: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from error
            raise
        try:
            workers, one_call = self._workers()
            config = info["vllm_config"]
            if "model_config" not in config and workers and "config" in workers[0]:
                config = workers[0]["config"]  # the Rust front end does not know it
            model = config["model_config"]
            transfer = config.get("weight_transfer_config") or {}
            return ServerFacts(
                model=str(model["model"]),
                dtype=str(model["dtype"]).removeprefix("torch."),
                max_model_len=int(model["max_model_len"]),
                weight_backend=transfer.get("backend"),
                workers=tuple(workers),
                one_call=one_call,
                adapters=_adapter_facts(config, info.get("vllm_env") or {}),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ServerCapabilityError(
                f"what answers at {self.url} is no vLLM server: /server_info lacks what one says of itself ({error!r})"
            ) from error

    def _workers(self) -> tuple[list[dict[str, Any]], bool]:
        """What the workers say of themselves, and whether it was our middleware that asked them."""
        with contextlib.suppress(ServerError), self._reading():  # it lacks our middleware, or our worker extension
            return list(self._call("GET", SYNC_PATH)["workers"]), True
        with contextlib.suppress(ServerError), self._reading():
            answer = self._call("POST", "/collective_rpc", {"method": "loopwright_state"})
            return [state for state in answer["results"] if isinstance(state, dict)], False
        return [], False

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def world_size(self) -> int:
        """Workers of the server."""
        with self._reading():
            return int(self._call("GET", "/get_world_size")["world_size"])

    def sync(self, update_info: dict[str, Any], version: int) -> dict[str, Any]:
        """Pause, update, resume in one call; only where `ServerFacts.one_call`. Seconds `pause_s` and `load_s`, and more."""
        with self._reading():
            answer = self._call("POST", SYNC_PATH, {"update_info": update_info, "version": str(version)})
            return answer | {"pause_s": float(answer["pause_s"]), "load_s": float(answer["load_s"])}

    def pause(self) -> None:
        """In-flight requests are kept; their keys and values are computed again with the new weights."""
        self._call("POST", "/pause?mode=keep&clear_cache=true")

    def resume(self) -> None:
        self._call("POST", "/resume", timeout_s=min(self.timeout_s, LOOK_TIMEOUT_S))

    def is_paused(self) -> bool:
        with self._reading():
            return bool(self._call("GET", "/is_paused")["is_paused"])

    def start_update(self) -> None:
        """Open an update session; one that a dead trainer left open is closed first."""
        try:
            self._call("POST", "/start_weight_update")
        except ServerError as error:
            if "already active" not in str(error):
                raise
            try:
                # A refused update ends the session and touches no weight.
                self.update({})
            except ServerError:
                logger.info("closed a weight update that was left open on %s", self.url)
            self._call("POST", "/start_weight_update")

    def update(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", {"update_info": update_info})

    def finish_update(self, version: int) -> None:
        self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        self._told = str(version)

    def weight_version(self) -> str:
        """The version of the last finished update; on a fresh server "default", or "None" where vLLM keeps no version.

        A vLLM that keeps none and has no worker extension of ours cannot tell: then what this client told it last.
        """
        if self.adapter is not None:
            return str(version_of(self.adapter)) if self.adapter in self.loaded_adapters() else "default"
        try:
            with self._reading():
                return str(self._call("GET", "/weight_info", timeout_s=min(self.timeout_s, LOOK_TIMEOUT_S))["weight_version"])
        except ServerError as error:
            if error.status != 404:
                raise
        with self._reading():
            versions = {str(worker["version"]) for worker in self._workers()[0]} or {self._told}
        return versions.pop() if len(versions) == 1 else f"none in common: {sorted(versions)}"

    def loaded_adapters(self) -> list[str]:
        """Names of the adapters it serves."""
        with self._reading():
            models = self._call("GET", "/v1/models", timeout_s=min(self.timeout_s, LOOK_TIMEOUT_S))["data"]
            return [str(model["id"]) for model in models if model.get("parent") is not None]

    def load_adapter(self, name: str, folder: str) -> None:
        """Requests that name it get it as soon as this returns. `folder`: with an adapter as peft writes it."""
        try:
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except ServerError as error:
            if "already been loaded" not in str(error):  # a first try of which the answer was lost
                raise
        self.adapter = name

    def unload_adapter(self, name: str) -> None:
        """Requests that name it are refused from now on."""
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except ServerError as error:
            if "cannot be found" not in str(error):
                raise

    def sampled(self, prompt: np.ndarray, max_tokens: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 and float64 [max_tokens]: what it samples at temperature 1 with the newest adapter, and the log-probabilities.

        `top_k`: of the vocabulary's size it restricts nothing, and a server that asks for one has it.
        """
        sampling = {"max_tokens": max_tokens, "temperature": 1.0, "top_k": top_k, "seed": 0, "logprobs": 0, "ignore_eos": True}
        body = {"model": self.adapter, "token_ids": prompt.tolist(), "sampling_params": sampling, "stream": False}
        with self._reading():
            choice = self._call("POST", "/inference/v1/generate", body)["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            return np.array(choice["token_ids"], np.int32), np.array(logprobs, np.float64)

    def prompt_logprobs(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """float64 [len(tokens) − 1]: log-probability of each token but the first, at temperature 1."""
        # A server that returns candidate sets refuses a request without top_k.
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0}
        body = {"token_ids": tokens.tolist(), "sampling_params": sampling, "cache_salt": str(version), "stream": False}
        with self._reading():
            rows = self._call("POST", "/inference/v1/generate", body)["prompt_logprobs"]
            return np.array([rows[i][str(token)]["logprob"] for i, token in enumerate(tokens.tolist()) if i], dtype=np.float64)


def _adapter_facts(config: dict[str, Any], env: dict[str, Any]) -> AdapterFacts | None:
    """Of a server's /server_info."""
    lora, parallel = config.get("lora_config"), config.get("parallel_config") or {}
    if not lora:
        return None
    return AdapterFacts(
        max_lora_rank=int(lora["max_lora_rank"]),
        max_loras=int(lora["max_loras"]),
        at_runtime=bool(env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", True)),
        api_processes=int(parallel.get("_api_process_count", 1)),
        data_parallel=int(parallel.get("data_parallel_size", 1)),
        forked_workers=int(parallel.get("tensor_parallel_size", 1)) > 1 and env.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork",
    )


@contextlib.contextmanager
def _whole_within(limit_s: float) -> Iterator[dict[str, Any]]:
    """Extensions of a request. httpx bounds every read by itself, so an answer that comes byte by byte would never be late.

    Raises:
        httpx.ReadTimeout: the answer was not whole within `limit_s`.
    """
    sockets: list[socket.socket] = []
    late = threading.Event()

    def note(event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            sockets.append(info["return_value"].get_extra_info("socket"))

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError, IndexError):
            sockets[-1].shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield {"trace": note}
    except httpx.HTTPError as error:
        if not late.is_set():
            raise
        raise httpx.ReadTimeout(f"no whole answer within {limit_s:.0f} s") from error
    finally:
        timer.cancel()


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        return response.text[:500]
