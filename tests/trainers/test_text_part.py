"""Models that also see, trained on text alone: the right numbers, and nothing but the text part trained, kept or sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config
from tests.support.tiny_model import build_model
from tests.support.tiny_vision import build_vision_model
from trainers import attention, lora
from trainers.algorithms.grpo import GRPO
from trainers.batch import PackedBatch
from trainers.callbacks import PrintSink
from trainers.checkpoint import latest_whole
from trainers.errors import ConfigError
from trainers.loop import TrainLoop
from trainers.model import Policy, build_policy, load_model
from trainers.packing import pack_row
from trainers.perf import FlopCounter
from trainers.text_part import outside_text, text_tower
from trainers.types import Sample
from trainers.weight_sync.layout import make_layout

KINDS = ["qwen3_vl", "qwen2_5_vl"]


def vision_policy(kind: str = "qwen3_vl", **fields: Any) -> Policy:
    attention.install(ONE_RANK.device, torch.float32, log=False)
    model = build_vision_model(kind)
    model.set_attn_implementation(attention.NAME)
    return build_policy(model, grpo_config(**fields), ONE_RANK)


def sample(tokens: np.ndarray, group: str) -> Sample:
    mask = np.arange(len(tokens)) > 0
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(group, tokens.astype(np.int32), mask, np.zeros(len(tokens), np.float32), 1.0, 0, versions)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_log_probabilities_of_the_models_own_forward(kind):
    """Positions start anew in every segment of a row; the model's own are those of one sequence."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 58, length) for length in (23, 7, 40)]
    batch = PackedBatch.from_row(pack_row([sample(text, str(i)) for i, text in enumerate(texts)]), ONE_RANK.device)
    with torch.no_grad():
        packed = vision_policy(kind)(batch).logprobs
    plain, expected = build_vision_model(kind), []
    for text in texts:
        ids = torch.from_numpy(text)[None]
        with torch.no_grad():
            scores = plain(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].log_softmax(-1)
        expected.append(scores.gather(-1, ids[0, 1:, None])[:, 0])
    assert (packed - torch.cat(expected)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_everything_outside_the_text_part_is_frozen(kind):
    policy = vision_policy(kind)
    frozen = {name for name, parameter in policy.model.named_parameters() if not parameter.requires_grad}
    assert frozen == outside_text(policy.model) == {name for name, _ in policy.model.named_parameters() if ".visual." in name}
    assert frozen and all(p.requires_grad for p in text_tower(policy.model).parameters())


def test_a_run_trains_and_keeps_the_text_part_and_leaves_the_tower(tmp_path):
    policy = vision_policy(gradient_checkpointing=True)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    config = grpo_config(output_dir=str(tmp_path), max_steps=2, save_steps=2, bf16=False)
    loop = TrainLoop(config, GRPO(config), policy, ONE_RANK, FakeSource(steps=2), sink=PrintSink())
    loop.run()
    tower = outside_text(policy.model)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in tower), name
    held = {id(parameter) for group in loop.optimizer.param_groups for parameter in group["params"]}
    named = dict(policy.model.named_parameters())
    assert held == {id(parameter) for name, parameter in named.items() if name not in tower}
    assert len(loop.optimizer.state) == len(held)
    checkpoint = latest_whole(tmp_path)
    assert checkpoint is not None
    loaded = load_model(grpo_config(model=str(checkpoint)))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, named[name]), name


@pytest.mark.parametrize("everything", [True, False])
def test_the_tower_is_never_sent(everything):
    policy = vision_policy()
    layout = make_layout(policy.model, torch.float32, everything=everything)
    sent = {name for block in layout.blocks for name in block}
    assert sent == {name for name, _ in policy.model.named_parameters()} - outside_text(policy.model)
    assert layout.partial, "the server keeps what it loaded itself"


def test_an_adapter_goes_into_the_text_part_alone():
    policy = vision_policy(peft={"r": 4})
    adapted = {name.split(".lora_")[0] for name in lora.adapter_parameters(policy.model)}
    assert len(adapted) == 2 * 7 and all(".language_model.layers." in name for name in adapted)
    with pytest.raises(ConfigError, match=r'may reach outside the text part .*write target_modules="all-linear"'):
        vision_policy(peft={"target_modules": ["q_proj", "qkv"]})


def test_the_tower_costs_no_flops():
    policy = vision_policy()
    text = {name: p.numel() for name, p in policy.model.named_parameters() if ".language_model." in name}
    del text["model.language_model.embed_tokens.weight"]
    assert FlopCounter(policy.model).body == 6 * sum(text.values())


def test_a_model_without_a_text_tower_of_its_own_is_refused(monkeypatch):
    model = build_vision_model()
    monkeypatch.setattr(model, "get_decoder", lambda: model)
    with pytest.raises(ConfigError, match="has no text tower of its own"):
        text_tower(model)
    crossing = build_vision_model()
    crossing.config.get_text_config().cross_attention_layers = [1]
    with pytest.raises(ConfigError, match="attends to images inside its text layers"):
        text_tower(crossing)


def test_a_text_model_is_its_own_text_part():
    model = build_model()
    assert text_tower(model) is model.model and outside_text(model) == set()
