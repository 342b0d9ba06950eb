"""The trainer's side of a vLLM server: control plane, weight updates, probe logprobs. Synchronous, rank 0 only.

Every call opens its own connection: after an error in the control plane the server drops the connection it came on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from trainers.errors import ServerCapabilityError, ServerError

logger = logging.getLogger(__name__)
BACKEND = "loopwright"
SYNC_PATH = "/loopwright/sync"
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the trainer needs to know of a server. `dtype` is torch's name (`float32`, `bfloat16`).

    `workers`: what each worker says of itself (device, machine, version …); empty without our worker extension.
    `one_call`: it has our middleware, which does a whole weight sync in one call.
    """

    model: str
    dtype: str
    max_model_len: int
    weight_backend: str | None
    workers: tuple[dict[str, Any], ...] = ()
    one_call: bool = False


class ServerClient:
    """HTTP calls to one server. The key comes from `key` or the environment variable VLLM_API_KEY.

    Methods raise `ServerError` with the server's own message when it refuses, cannot be reached or does not answer in time.
    """

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._told = "None"
        self.timeout_s = timeout_s
        key = key if key is not None else os.environ.get("VLLM_API_KEY", "")
        self.http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_keepalive_connections=0),
            # Loopback and private addresses: a proxy from the environment would only get in the way.
            trust_env=False,
        )

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        limit = httpx.Timeout(timeout_s or self.timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            response = self.http.request(method, path, json=body, timeout=limit)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code == 401:
            raise ServerCapabilityError(f"{self.url} wants a key: set VLLM_API_KEY to the server's")
        if response.status_code >= 400:
            raise ServerError(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
        try:
            return response.json()
        except ValueError:
            return None

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
            config = self._call("GET", "/server_info?config_format=json")["vllm_config"]
        except ServerError as error:
            if "404" in str(error):
                raise ServerCapabilityError(
                    f"{self.url} has no control endpoints: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from error
            raise
        model = config["model_config"]
        transfer = config.get("weight_transfer_config") or {}
        workers, one_call = self._workers()
        return ServerFacts(
            model=str(model["model"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            max_model_len=int(model["max_model_len"]),
            weight_backend=transfer.get("backend"),
            workers=tuple(workers),
            one_call=one_call,
        )

    def _workers(self) -> tuple[list[dict[str, Any]], bool]:
        """What the workers say of themselves, and whether it was our middleware that asked them."""
        with contextlib.suppress(ServerError):  # it lacks our middleware, or our worker extension
            return list(self._call("GET", SYNC_PATH)["workers"]), True
        with contextlib.suppress(ServerError):
            answer = self._call("POST", "/collective_rpc", {"method": "loopwright_state"})
            return [state for state in answer["results"] if isinstance(state, dict)], False
        return [], False

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def world_size(self) -> int:
        """Workers of the server."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    def sync(self, update_info: dict[str, Any], version: int) -> dict[str, Any]:
        """Pause, update, resume in one call; only where `ServerFacts.one_call`. Seconds `pause_s` and `load_s`, and more."""
        return self._call("POST", SYNC_PATH, {"update_info": update_info, "version": str(version)})

    def pause(self) -> None:
        """In-flight requests are kept; their keys and values are computed again with the new weights."""
        self._call("POST", "/pause?mode=keep&clear_cache=true")

    def resume(self) -> None:
        self._call("POST", "/resume")

    def is_paused(self) -> bool:
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
        try:
            return str(self._call("GET", "/weight_info")["weight_version"])
        except ServerError as error:
            if "404" not in str(error):
                raise
        versions = {str(worker["version"]) for worker in self._workers()[0]} or {self._told}
        return versions.pop() if len(versions) == 1 else f"none in common: {sorted(versions)}"

    def prompt_logprobs(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """float64 [len(tokens) − 1]: log-probability of each token but the first, at temperature 1."""
        # A server that returns candidate sets refuses a request without top_k.
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0}
        body = {"token_ids": tokens.tolist(), "sampling_params": sampling, "cache_salt": str(version), "stream": False}
        rows = self._call("POST", "/inference/v1/generate", body)["prompt_logprobs"]
        return np.array([rows[i][str(token)]["logprob"] for i, token in enumerate(tokens.tolist()) if i], dtype=np.float64)


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        return response.text[:500]
