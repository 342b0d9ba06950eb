"""What the trainer needs of an inference engine, so that another one is one file (`docs/inference_contract.md`).

`trainers.server.ServerClient` is vLLM. Rollouts talk to an engine through `trainers.rollouts.client`, by the same document.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from trainers.server import ServerFacts


class InferenceEngine(Protocol):
    """One server, called by rank 0 only. Every method raises `ServerError` when the server refuses or cannot be reached.

    Order of an update: pause, start, update (once or more), finish, resume; or `sync`, which does it in one call. A server
    that was resumed without a finished update serves what it served before, under the version it had.
    """

    url: str

    def wait_healthy(self, timeout_s: float | None = None) -> None:
        """Returns once it can generate."""
        ...

    def facts(self) -> ServerFacts:
        """Raises `ServerCapabilityError` where it cannot take part in a run at all."""
        ...

    def pause(self) -> None:
        """No request computes after this returns; those in flight are kept, and no prefix computed so far is used again."""
        ...

    def resume(self) -> None:
        """Requests go on; harmless when not paused."""
        ...

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Told once per transport and layout, before the first update that uses them."""
        ...

    def start_update(self) -> None: ...

    def update(self, update_info: dict[str, Any]) -> None:
        """Returns when the weights are in place. Refused before any is touched if they do not fit the model."""
        ...

    def finish_update(self, version: int) -> None:
        """What is generated from now on carries `version`."""
        ...

    def sync(self, update_info: dict[str, Any], version: int) -> dict[str, Any]:
        """A whole update where `ServerFacts.one_call`; returns seconds `pause_s` and `load_s`."""
        ...

    def world_size(self) -> int:
        """Workers that take part in a broadcast of the engine's own."""
        ...

    def weight_version(self) -> str:
        """Of the last finished update; anything but a whole number on a fresh server."""
        ...

    def prompt_logprobs(self, tokens: np.ndarray, version: int) -> np.ndarray:
        """float64 [len(tokens) − 1]: log-probability of each token but the first, at temperature 1."""
        ...


class AdapterEngine(InferenceEngine, Protocol):
    """One that serves low-rank adapters beside its base model; requests name theirs as `model`. `weight_version` is then that
    of `adapter` for as long as it is loaded."""

    adapter: str | None  # the newest

    def loaded_adapters(self) -> list[str]:
        """Names of the adapters it serves."""
        ...

    def load_adapter(self, name: str, folder: str) -> None:
        """Requests that name it get it as soon as this returns. `folder`: with an adapter as peft writes it."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Requests that name it are refused from now on; harmless when it is not loaded."""
        ...

    def sampled(self, prompt: np.ndarray, max_tokens: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 and float64 [max_tokens]: what `adapter` samples at temperature 1, and the log-probabilities."""
        ...
