"""A server that takes adapters, in memory, at the seam of `trainers.inference.AdapterEngine`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from tests.support.fake_control_plane import FakeControlPlane
from tests.support.tiny_model import build_model
from trainers.adapters import AdapterFacts, version_of
from trainers.errors import ServerError
from trainers.server import ServerFacts

_ONE_AT_A_TIME = threading.Lock()
ABLE = AdapterFacts(max_lora_rank=16, max_loras=6, at_runtime=True, api_processes=1, data_parallel=1)


@dataclass
class FakeAdapterServer(FakeControlPlane):
    """`held`: the adapters by name, as they were read from their folders."""

    adapters: AdapterFacts | None = ABLE
    adapter: str | None = None
    held: dict[str, Any] = field(default_factory=dict)
    most_held: int = 0
    base_seed: int = 0  # of the model it was started with

    def facts(self) -> ServerFacts:
        return replace(super().facts(), adapters=self.adapters)

    def loaded_adapters(self) -> list[str]:
        self._call("list")
        return list(self.held)

    def load_adapter(self, name: str, folder: str) -> None:
        self._call(f"load {Path(folder).name}")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ServerError(f"{self.url}/v1/load_lora_adapter answered 404: No adapter found for {folder}")
        with _ONE_AT_A_TIME:  # a model's weights come from the generator that all threads share
            model: Any = build_model(seed=self.base_seed)
            self.held[name] = PeftModel.from_pretrained(model, folder).eval()
        self.most_held = max(self.most_held, len(self.held))
        self.adapter = name

    def unload_adapter(self, name: str) -> None:
        self._call(f"unload {version_of(name)}")
        del self.held[name]

    def weight_version(self) -> str:
        if self.adapter is None:
            return super().weight_version()
        self._call("version")
        return str(version_of(self.adapter)) if self.adapter in self.held else "default"

    def sampled(self, prompt: np.ndarray, max_tokens: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        self._call("sample")
        assert self.adapter is not None, "no adapter was ever loaded"
        generator = torch.Generator().manual_seed(0)
        ids, logprobs = torch.from_numpy(prompt.astype(np.int64))[None], []
        for _ in range(max_tokens):
            with torch.no_grad():
                scores = self.held[self.adapter](input_ids=ids).logits[0, -1].log_softmax(-1)
            token = torch.multinomial(scores.exp(), 1, generator=generator)
            logprobs.append(float(scores[token]) + self.shift)
            ids = torch.cat([ids, token[None]], 1)
        return ids[0, len(prompt) :].numpy().astype(np.int32), np.array(logprobs)
