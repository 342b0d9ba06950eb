"""A control plane in memory, at the seam of `trainers.server.ServerClient`; refuses calls or serves wrong weights on demand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.tiny_model import build_model
from trainers.errors import ServerError
from trainers.server import BACKEND, ServerFacts


def served_logprobs(weights: dict[str, torch.Tensor], tokens: np.ndarray) -> np.ndarray:
    """What a server with these weights answers: a plain transformers model's logprobs."""
    model = build_model(seed=99)
    model.load_state_dict(weights, strict=False)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0].double().numpy()


@dataclass
class FakeControlPlane:
    """`fail` maps a method to messages: each call takes one and raises it, an empty message lets the call through."""

    fail: dict[str, list[str]] = field(default_factory=dict)
    backend: str | None = BACKEND
    dtype: str = "float32"
    shift: float = 0.0  # added to every probe logprob: a server with other weights
    url: str = "http://fake"
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    version: str = "default"
    weights: dict = field(default_factory=dict)
    reference: object = None  # callable(weights, tokens) → logprobs

    def _call(self, name: str) -> None:
        self.calls.append(name)
        messages = self.fail.get(name)
        if messages and (message := messages.pop(0)):
            raise ServerError(message)

    def wait_healthy(self, timeout_s: float | None = None) -> None:
        self._call("health")

    def facts(self) -> ServerFacts:
        return ServerFacts("m", self.dtype, 512, self.backend)

    def init_weight_transfer(self, init_info: dict) -> None:
        assert "directory" not in init_info or Path(init_info["directory"]).is_dir()
        self._call("layout" if "layout" in init_info else "init")

    def pause(self) -> None:
        # A call that fails may have taken effect before its answer was lost.
        self.paused = True
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")
        self.paused = False

    def start_update(self) -> None:
        assert self.paused, "an update while requests run"
        self._call("start")

    def update(self, update_info: dict) -> None:
        self._call("update")
        self.weights = {**self.weights, **load_file(update_info["path"])}

    def finish_update(self, version: int) -> None:
        self._call("finish")
        self.version = str(version)

    def sync(self, update_info: dict, version: int) -> dict:
        raise AssertionError("it says that it has no such call")

    def world_size(self) -> int:
        return 1

    def weight_version(self) -> str:
        self._call("version")
        return self.version

    def prompt_logprobs(self, tokens: np.ndarray, version: int) -> np.ndarray:
        self._call("probe")
        assert not self.paused, "a probe of a paused server would wait for ever"
        return self.reference(self.weights, tokens) + self.shift  # type: ignore[operator]
