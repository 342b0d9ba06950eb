"""`docs/inference_contract.md` as a test. By default the real vLLM CPU server; by environment any engine with its adapter.

LOOPWRIGHT_CONTRACT_URL, VLLM_API_KEY     the server
LOOPWRIGHT_CONTRACT_MODEL                 a folder with the checkpoint that it serves, readable by both
LOOPWRIGHT_CONTRACT_ENGINE                module:Class of the adapter (default: trainers.server:ServerClient)
"""

from __future__ import annotations

import importlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trainers.errors import ServerError
from trainers.inference import InferenceEngine

pytestmark = pytest.mark.server

TOKENS = np.array([1, 4, 8, 43, 8, 47, 48, 5, 9, 12, 20, 31], np.int32)
CLOSE = 2e-2  # nats


class Contract:
    """An engine, the requests beside it, and two sets of weights that its model can hold."""

    def __init__(self, url: str, key: str, model: Path, folder: Path) -> None:
        module, name = os.environ.get("LOOPWRIGHT_CONTRACT_ENGINE", "trainers.server:ServerClient").split(":")
        self.engine: InferenceEngine = getattr(importlib.import_module(module), name)(url, 120.0, key)
        self.url, self.key, self.folder = url, key, folder
        files = sorted(model.glob("*.safetensors"))
        original = {name: tensor for file in files for name, tensor in load_file(file).items()}
        save_file(original, folder / "original.safetensors")
        turned = {name: tensor.roll(1, 0) if tensor.dim() > 1 else tensor for name, tensor in original.items()}
        save_file(turned, folder / "other.safetensors")
        self.engine.init_weight_transfer({"transport": "file", "directory": str(folder)})

    def generate(self, tokens: Any = TOKENS, **sampling: Any) -> dict[str, Any]:
        body = {
            "token_ids": [int(t) for t in tokens],
            "sampling_params": {"max_tokens": 8, "logprobs": 0, "ignore_eos": True} | sampling,
        }
        with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120) as client:
            return client.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"][0]

    def update(self, name: str, version: int) -> None:
        try:
            self.engine.pause()
            self.engine.start_update()
            self.engine.update({"path": str(self.folder / f"{name}.safetensors"), "version": str(version)})
            self.engine.finish_update(version)
        finally:
            self.engine.resume()

    def logprobs(self, salt: int = 0) -> np.ndarray:
        return self.engine.prompt_logprobs(TOKENS, salt)


@pytest.fixture
def contract(request, tmp_path, monkeypatch):
    model = os.environ.get("LOOPWRIGHT_CONTRACT_MODEL")
    if url := os.environ.get("LOOPWRIGHT_CONTRACT_URL"):
        assert model is not None, "set LOOPWRIGHT_CONTRACT_MODEL to the folder of the checkpoint that the server holds"
        contract = Contract(url, os.environ.get("VLLM_API_KEY", ""), Path(model), tmp_path)
    else:
        server = request.getfixturevalue("vllm_server")
        contract = Contract(server.url, server.key, server.model_dir, tmp_path)
    contract.update("original", 100)
    yield contract
    contract.update("original", 101)
    shutil.rmtree(tmp_path)


def test_it_is_healthy_and_says_what_it_is(contract):
    contract.engine.wait_healthy(30.0)
    facts = contract.engine.facts()
    assert facts.max_model_len >= len(TOKENS) + 8 and isinstance(getattr(torch, facts.dtype), torch.dtype)


def test_without_the_key_only_health_answers(contract):
    with httpx.Client(base_url=contract.url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        assert client.post("/inference/v1/generate", json=body).status_code == 401
        assert client.post("/pause", params={"mode": "keep"}).status_code == 401


def test_tokens_go_in_and_tokens_with_their_logprobs_come_out(contract):
    choice = contract.generate(temperature=1.0, seed=3)
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(choice["token_ids"]) == len(logprobs) == 8 and all(value <= 0 for value in logprobs)
    assert choice["finish_reason"] == "length"
    again = contract.generate(temperature=1.0, seed=3)
    assert again["token_ids"] == choice["token_ids"]
    # What it sampled has the logprob that it gives for the same tokens as a prompt.
    whole = np.array([*TOKENS, *choice["token_ids"]], np.int32)
    given = contract.engine.prompt_logprobs(whole, 0)[len(TOKENS) - 1 :]
    np.testing.assert_allclose(logprobs, given, atol=CLOSE)


def test_an_update_changes_what_it_serves_with_its_version_and_no_stale_prefix(contract):
    before = contract.logprobs()
    contract.update("other", 7)
    assert contract.engine.weight_version() == "7"
    changed = contract.logprobs()  # under the same cache salt
    assert np.abs(changed - before).mean() > 10 * CLOSE
    contract.update("original", 8)
    np.testing.assert_allclose(contract.logprobs(), before, atol=CLOSE)
    assert contract.engine.weight_version() == "8"


def test_requests_in_flight_are_kept_through_an_update(contract):
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(contract.generate, temperature=1.0, seed=seed, max_tokens=150) for seed in range(4)]
        contract.update("other", 9)
        choices = [future.result() for future in running]
    assert all(choice["finish_reason"] == "length" and len(choice["token_ids"]) == 150 for choice in choices)
    for choice in choices:
        for span in choice.get("weight_versions") or []:
            assert span["version"] in ("100", "9")


def test_a_paused_server_computes_nothing_and_a_second_resume_harms_nothing(contract):
    contract.engine.pause()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(contract.generate)
        contract.engine.start_update()
        contract.engine.update({"path": str(contract.folder / "other.safetensors"), "version": "11"})
        contract.engine.finish_update(11)
        assert not waiting.done(), "it generated while it was paused"
        contract.engine.resume()
        contract.engine.resume()
        assert len(waiting.result()["token_ids"]) == 8


def test_an_update_that_does_not_fit_is_refused_and_the_old_weights_stay(contract):
    before, held = contract.logprobs(), contract.engine.weight_version()
    tensors = load_file(contract.folder / "other.safetensors")
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, contract.folder / "lacking.safetensors")
    with pytest.raises(ServerError):
        contract.update("lacking", 12)
    assert contract.engine.weight_version() == held
    np.testing.assert_allclose(contract.logprobs(), before, atol=CLOSE)


def test_a_whole_sync_in_one_call_where_it_says_so(contract):
    if not contract.engine.facts().one_call:
        pytest.skip("the engine has no such call")
    answer = contract.engine.sync({"path": str(contract.folder / "other.safetensors"), "version": "13"}, 13)
    assert answer["pause_s"] >= 0 and answer["load_s"] > 0 and contract.engine.weight_version() == "13"
    before = contract.logprobs()
    with pytest.raises(ServerError):
        contract.engine.sync({"path": str(contract.folder / "absent.safetensors"), "version": "14"}, 14)
    # It resumed by itself, on what it had.
    np.testing.assert_allclose(contract.logprobs(), before, atol=CLOSE)
    assert contract.engine.weight_version() == "13"
