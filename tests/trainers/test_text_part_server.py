"""A model that also sees, in a real server: its text part is trained and sent, its tower is what the server loaded itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from infra.leases import LeaseManager
from infra.registry import Registry
from infra.vllm import ServerSpec, start_server
from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config
from tests.support.text_only_torchvision import write_torchvision
from tests.support.tiny_model import build_tokenizer
from tests.support.tiny_vision import build_vision_model
from trainers import attention
from trainers.algorithms.grpo import GRPO
from trainers.callbacks import PrintSink
from trainers.loop import TrainLoop
from trainers.model import build_policy, load_model, probe_logprobs
from trainers.server import ServerClient
from trainers.text_part import outside_text
from trainers.weight_sync.sync import ServerSync

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS = 4


class Recording(ServerClient):
    """Keeps the names that it was told of, layout by layout."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent: list[set[str]] = []

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        if "layout" in init_info:
            self.sent.append({tensor[0] for tensor in init_info["layout"]["tensors"]})
        super().init_weight_transfer(init_info)


def test_a_served_model_that_also_sees_is_trained_on_text_and_gets_every_step_without_its_tower(tmp_path: Path, monkeypatch):
    """Every sync compares log-probabilities of a probe; at the end, those of what the server then generates."""
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path / "weights"))
    model_dir = tmp_path / "model"
    build_vision_model("qwen3_vl").save_pretrained(model_dir)
    build_tokenizer().save_pretrained(model_dir)
    spec = ServerSpec(
        str(model_dir),
        name="seeing",
        device="cpu",
        max_model_len=256,
        extra_args=("--language-model-only",),
        env={"PYTHONPATH": write_torchvision(tmp_path / "stubs")},
    )
    with LeaseManager(Registry(tmp_path / "registry.db")) as leases:
        server = start_server(spec, leases.lease_port(), log_path=tmp_path / "log")
        try:
            server.wait_ready(timeout_s=1800)
            _train(tmp_path, model_dir, server.url, server.api_key)
        finally:
            server.stop()


def _train(folder: Path, model_dir: Path, url: str, key: str) -> None:
    attention.install(ONE_RANK.device, torch.float32, log=False)
    config = grpo_config(
        model=str(model_dir),
        output_dir=str(folder / "run"),
        vllm_server_base_url=url,
        vllm_server_timeout=300,
        weight_check_steps=1,
        max_steps=STEPS,
        learning_rate=1e-2,
        bf16=False,
    )
    model = load_model(config)
    model.set_attn_implementation(attention.NAME)
    policy = build_policy(model, config, ONE_RANK)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    client = Recording(url, 300, key)
    sync = ServerSync(config, ONE_RANK, build_tokenizer(), [client])
    TrainLoop(config, GRPO(config), policy, ONE_RANK, FakeSource(steps=STEPS), weight_sync=sync, sink=PrintSink()).run()

    tower = outside_text(policy.model)
    moved = {name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == before.keys() - tower, "the text part was trained, and it alone"
    assert client.sent and not tower & set().union(*client.sent) and any(".visual." in name for name in tower)
    assert client.weight_version() == str(STEPS)

    # Sampled from the last step's weights: what the probe compares is a fixed text.
    sampling = {"max_tokens": 40, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "ignore_eos": True, "seed": 1}
    prompt = [1, 4, 8, 15, 16, 23, 42]
    answer = httpx.post(
        f"{url}/inference/v1/generate",
        json={"token_ids": prompt, "sampling_params": sampling},
        headers={"Authorization": f"Bearer {key}"},
        timeout=300,
    )
    choice = answer.raise_for_status().json()["choices"][0]
    got = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
    expected = probe_logprobs(policy, np.array(prompt + choice["token_ids"], np.int32), ONE_RANK.device)[len(prompt) - 1 :]
    np.testing.assert_allclose(got, expected, atol=2e-3)
    sync.close()
