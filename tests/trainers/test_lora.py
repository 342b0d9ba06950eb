"""Low-rank adapters: what is trained, what is saved, what a server without adapters is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_model, build_tiny_model, build_tokenizer
from trainers import attention, export, lora, session
from trainers.algorithms.grpo import GRPO
from trainers.callbacks import PrintSink
from trainers.checkpoint import latest_whole
from trainers.config import GRPOConfig, PeftConfig, SFTConfig
from trainers.errors import ConfigError
from trainers.grpo_trainer import AsyncGRPOConfig, AsyncGRPOTrainer
from trainers.head import token_logprobs
from trainers.loop import TrainLoop
from trainers.model import Policy, build_policy, gathered_parameters, load_model, probe_logprobs
from trainers.weight_sync.layout import make_layout
from trainers.weight_sync.staging import Staging

VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_dora": True},
    {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}},
    {"modules_to_save": ["lm_head"]},
    {"target_modules": ["embed_tokens", "q_proj"]},
]


def peft(**options: Any) -> PeftConfig:
    return PeftConfig.model_validate(options)


def adapted(tied: bool = False, dtype: torch.dtype = torch.float32, **peft: Any) -> Policy:
    """A policy whose adapter has moved away from where it began."""
    policy = tiny_policy(grpo_config(peft={"r": 4, **peft}), dtype, tied=tied)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for parameter in lora.adapter_parameters(policy.model).values():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return policy


def train(folder: Path, until: int, total: int = 4, **peft: Any) -> tuple[Policy, list[float]]:
    """Steps of GRPO from the newest checkpoint in `folder`, if any; the policy and the losses logged by then."""
    config = grpo_config(output_dir=str(folder), max_steps=total, save_steps=2, bf16=False, peft={"r": 4, **peft})
    policy = tiny_policy(config)
    loop = TrainLoop(config, GRPO(config), policy, ONE_RANK, FakeSource(steps=until), sink=PrintSink())
    loop.run(latest_whole(folder))
    return policy, [entry["loss"] for entry in loop.callbacks.state.log_history]


# Configuration -------------------------------------------------------------------------------------------------------


def test_a_lora_config_of_peft_is_understood():
    given = LoraConfig(r=6, lora_alpha=12, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM", use_rslora=True)
    config = lora.config_of(given)
    assert (config.r, config.lora_alpha, config.target_modules, config.lora_dropout) == (6, 12, ["q_proj"], 0.1)
    assert config.use_rslora and config.merged_only is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_bias": True}, "lora_bias.*lora_only"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_parameters": ["w"]}, "target_parameters.*target_modules"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
    ],
)
def test_options_of_peft_that_cannot_be_used_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=rf"(?s)peft_config cannot be used:.*{words}"):
        lora.config_of(LoraConfig(**options))


def test_another_kind_of_adapter_is_refused():
    from peft import IA3Config

    with pytest.raises(ConfigError, match=r"IA3Config: only peft\.LoraConfig"):
        lora.config_of(IA3Config())


def test_a_quantised_base_is_refused_by_config_and_by_model():
    with pytest.raises(ValidationError, match=r"quantization_config: a quantised model \(QLoRA\).*dtype=bfloat16"):
        SFTConfig(model="m", dataset={"path": "d"}, peft={}, model_init_kwargs={"quantization_config": {}})  # type: ignore[arg-type]
    model = build_model()
    model.is_quantized = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"loaded quantised \(QLoRA\).*dtype=bfloat16"):
        build_policy(model, grpo_config(peft={"r": 4}), ONE_RANK)


@pytest.mark.parametrize("how", ["adapter of a script's own", "no adapter"])
def test_a_quantised_model_is_refused_however_it_came(how):
    """A script that trains QLoRA gives a `PeftModel`; a packaged 8-bit model says in its own config.json what it is."""
    model = build_model()
    if how != "no adapter":
        lora.attach(model, peft(), "base", 0)
    layer: Any = model.model.layers[0].mlp
    layer.down_proj = nn.Linear(1, 1)
    layer.down_proj.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.uint8), requires_grad=False)  # as 4-bit weights lie
    with pytest.raises(ConfigError, match=r"loaded quantised \(QLoRA\).*name the model that it was made of"):
        build_policy(model, grpo_config(), ONE_RANK)


@pytest.mark.parametrize(
    ("options", "serving"),
    [
        ({"r": 16}, (16, 6)),
        ({"r": 17}, (32, 6)),
        ({"r": 4, "rank_pattern": {"q_proj": 300}}, (320, 6)),
        ({"r": 513}, None),
        ({"use_dora": True}, None),
        ({"bias": "all"}, None),
        ({"modules_to_save": ["lm_head"]}, None),
    ],
)
def test_what_a_server_must_take_follows_from_the_adapter(options, serving):
    assert grpo_config(peft=options).adapter_serving == serving
    assert grpo_config(peft=options, weight_sync="shared_storage").adapter_serving is None


def test_lora_sync_needs_an_adapter_that_can_be_served():
    with pytest.raises(ValidationError, match="weight_sync=lora sends an adapter: set `peft`"):
        grpo_config(weight_sync="lora")
    with pytest.raises(ValidationError, match="peft use_dora: vLLM cannot serve that as an adapter; set weight_sync=auto"):
        grpo_config(weight_sync="lora", peft={"use_dora": True})


@pytest.mark.parametrize(
    ("tied", "options", "words"),
    [
        (False, {"target_modules": ["lm_head"]}, "has the output head"),
        (True, {"target_modules": ["embed_tokens"]}, "shares with its head"),
        (True, {"modules_to_save": ["lm_head"]}, "shares with its input embedding"),
        (False, {"target_modules": ["nothing"]}, "not found in the base model"),
    ],
)
def test_places_where_an_adapter_would_be_overlooked_are_refused(tied, options, words):
    with pytest.raises(ConfigError, match=words):
        lora.attach(build_model(tied=tied), peft(**options), "base", 0)


# Training ------------------------------------------------------------------------------------------------------------


def test_every_rank_begins_with_the_same_adapter_that_changes_nothing():
    plain, policy = tiny_policy(), tiny_policy(grpo_config(peft={}))
    torch.manual_seed(77)
    again = tiny_policy(grpo_config(peft={}))
    for one, two in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    tokens = np.arange(20, dtype=np.int32)
    one, two = (probe_logprobs(p, tokens, ONE_RANK.device) for p in (plain, policy))
    assert np.array_equal(one, two)


def test_a_base_of_16_bits_keeps_its_type_and_the_adapter_is_float32():
    policy = adapted(dtype=torch.bfloat16)
    types = {p.requires_grad: p.dtype for p in policy.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize(("options", "words"), [({"modules_to_save": ["lm_head"]}, "lm_head"), ({"bias": "all"}, "bias")])
def test_what_is_trained_whole_is_not_trained_in_16_bits(options, words):
    model = build_model(tied=False).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=rf"peft trains \S*{words}\S* whole, in bfloat16: .*dtype=float32"):
        lora.attach(model, peft(**options), "base", 0)


@pytest.mark.parametrize("peft", VARIANTS[:3])
def test_only_the_adapter_is_trained(tmp_path, peft):
    policy, losses = train(tmp_path, until=4, **peft)
    fresh = tiny_policy(grpo_config(peft={"r": 4, **peft}))
    moved = {name for (name, a), b in zip(policy.named_parameters(), fresh.parameters(), strict=True) if not torch.equal(a, b)}
    assert moved <= {f"model.{name}" for name in lora.adapter_parameters(policy.model)}
    assert any("lora_B" in name for name in moved) and any("lora_A" in name for name in moved)
    assert len(losses) == 4 and np.isfinite(losses).all()


def test_a_frozen_head_passes_the_same_gradient_on_and_gets_none():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((7, 8), (11, 8), (11,)))
    targets = torch.arange(7)
    grads = []
    for trained in (True, False):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained), bias.clone().requires_grad_(trained)
        token_logprobs(inputs[0], inputs[1], targets, bias=inputs[2], chunk=3).logprobs.sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    assert torch.equal(grads[0][0], grads[1][0]) and grads[0][1] is not None and grads[1][1] is grads[1][2] is None


def test_an_optimizer_made_before_the_adapter_is_refused():
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = grpo_config(peft={})
    with pytest.raises(ConfigError, match="made before the adapter holds none of its parameters"):
        session.build_loop(config, ONE_RANK, model=model, tokenizer=build_tokenizer(), optimizers=(optimizer, None))


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, losses = train(tmp_path / "whole", until=4)
    train(tmp_path / "halves", until=2)
    halves, resumed = train(tmp_path / "halves", until=4)
    assert resumed == losses and len(losses) == 4
    for one, two in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_holds_the_adapter_and_not_the_base(tmp_path):
    policy, _ = train(tmp_path, until=2, total=2)
    checkpoint = latest_whole(tmp_path)
    assert checkpoint is not None
    assert not (checkpoint / "model.safetensors").exists()
    adapter = sum(p.numel() * 4 for p in lora.adapter_parameters(policy.model).values())
    resume = sum(path.stat().st_size for path in (checkpoint / "resume").iterdir())
    assert resume < 3 * adapter + (1 << 18), "beside the adapter and Adam's two moments only names"
    loaded = PeftModel.from_pretrained(build_model(seed=0), str(checkpoint))
    ids = torch.arange(20)[None]
    expected = probe_logprobs(policy, np.arange(20, dtype=np.int32), ONE_RANK.device)
    got = loaded(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].detach().numpy()
    assert np.abs(got - expected).max() < 1e-4


def test_a_resume_loads_the_base_and_not_the_checkpoint(tmp_path):
    base = build_tiny_model(tmp_path / "base", seed=3)
    (tmp_path / "checkpoint").mkdir()
    model = load_model(grpo_config(model=str(base), peft={}), str(tmp_path / "checkpoint"))
    for name, parameter in build_model(seed=3).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_an_adapter_as_model_is_refused_and_says_how_to_merge_it(tmp_path):
    lora.save_adapter(adapted().model, lora.adapter_state(adapted().model, keep=True), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"is an adapter: .*python -m trainers\.export .* --merge`"):
        load_model(grpo_config(model=str(tmp_path / "adapter")))


def test_a_merged_model_is_a_plain_one(tmp_path, capsys):
    base = build_tiny_model(tmp_path / "base", tied=False)
    policy = adapted()
    policy.model.peft_config["default"].base_model_name_or_path = str(base)
    lora.save_adapter(policy.model, lora.adapter_state(policy.model, keep=True), tmp_path / "adapter")
    write_merged = lambda source, name: export.main([str(source), str(tmp_path / name), "--merge"])  # noqa: E731
    assert write_merged(tmp_path / "adapter", "merged") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, tensor in gathered_parameters(policy.model, None, keep=True):
        assert torch.equal(model.get_parameter(name), tensor), name
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()
    assert write_merged(base, "other") == 1 and "holds no adapter" in capsys.readouterr().err
    assert write_merged(tmp_path / "adapter", "merged") == 1 and "exists" in capsys.readouterr().err


# Merged weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", VARIANTS)
def test_merged_weights_are_those_of_peft_and_the_base_is_untouched(tmp_path, peft):
    policy = adapted(**peft)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    merged = dict(gathered_parameters(policy.model, None, keep=True))
    lora.save_adapter(policy.model, lora.adapter_state(policy.model, keep=True), tmp_path)
    expected: Any = PeftModel.from_pretrained(build_model(tied=False), str(tmp_path)).merge_and_unload()
    assert list(merged) == [name for name, _ in expected.named_parameters()]
    for name, parameter in expected.named_parameters():
        assert torch.equal(merged[name], parameter), name
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_buckets_hold_the_merged_weights_and_after_the_first_push_the_adapted_layers_alone():
    policy = adapted(tied=True)
    expected = dict(gathered_parameters(policy.model, None, keep=True))
    staging = Staging(ONE_RANK.device)
    everything = make_layout(policy.model, torch.float32, everything=True)
    staging.fill(policy, everything, torch.float32, keep=True)
    views = everything.views(staging.buckets)
    assert views.keys() == expected.keys() and all(torch.equal(views[name], expected[name]) for name in expected)
    later = make_layout(policy.model, torch.float32, everything=False)
    assert later.partial and {e.name for e in later.entries} == {name for name in expected if ".layers." in name}


# Python class --------------------------------------------------------------------------------------------------------


def reward(completions, **kwargs):
    return [0.0] * len(completions)


def test_the_trainer_takes_a_lora_config_or_a_peft_model(tmp_path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path))
    rows = [{"prompt": "1+1="}]
    by_config = AsyncGRPOTrainer(build_model(), reward, args, rows, build_tokenizer(), peft_config=LoraConfig(r=3))
    assert by_config.config.peft is not None and by_config.config.peft.r == 3
    model = get_peft_model(build_model(), LoraConfig(r=5, target_modules=["q_proj"]))
    by_model = AsyncGRPOTrainer(model, reward, args, rows, build_tokenizer())  # type: ignore[arg-type]
    assert by_model.config.peft is not None and by_model.config.peft.r == 5
    attention.install(ONE_RANK.device, torch.float32, log=False)
    by_model.model.set_attn_implementation(attention.NAME)
    policy = build_policy(by_model.model, by_model.config, ONE_RANK)
    assert len(lora.adapter_parameters(policy.model)) == 4, "the adapter it came with, and no other"
    with pytest.raises(ConfigError, match="has an adapter already"):
        AsyncGRPOTrainer(model, reward, args, rows, build_tokenizer(), peft_config=LoraConfig())  # type: ignore[arg-type]
    by_args = AsyncGRPOConfig(output_dir=str(tmp_path), peft=peft(r=7))
    assert AsyncGRPOTrainer(build_model(), reward, by_args, rows, build_tokenizer()).config.peft == peft(r=7)


def test_the_config_records_the_adapter(tmp_path):
    train(tmp_path, until=1, total=1)
    checkpoint = latest_whole(tmp_path)
    assert checkpoint is not None
    stored = json.loads((checkpoint / "loopwright_config.json").read_text())
    assert GRPOConfig.model_validate(stored).peft == peft(r=4)
    names = load_file(checkpoint / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
