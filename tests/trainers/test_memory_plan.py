"""The memory and time planner: against what was measured, against what a layer really keeps, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainers import memory_plan, step_time
from trainers.errors import ConfigError
from trainers.memory_plan import Levers
from trainers.model_shape import ModelShape, read_shape, shape_of

SMALL = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norms=True)  # Qwen3-0.6B
EIGHT = ModelShape(36, 4096, 12288, 32, 8, 128, 151936, tied=False, qk_norms=True)  # Qwen3-8B
H200 = 143771 * 2**20
ALL = Levers(offload=True, save_attention=True, mlp_tile_tokens=8192)
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}

# Of the last row, which nothing should have held: the last layer's recomputation, 11 hidden widths and log-sum-exp a token.
HELD_GB = 262144 * (11 * 2 * 1024 + 4 * 16) / 1e9
# Rows of benchmarks/RESULTS.md, one H200, cuDNN: tokens, levers, seconds, peak GB. All but the last: the model's own norms.
MEASURED = [
    (65536, Levers(own_kernels=False), 5.25, 17.3),
    (65536, dataclasses.replace(ALL, own_kernels=False), 4.50, 14.8),
    (262144, dataclasses.replace(ALL, own_kernels=False), 56.9, 30.2),
    (262144, ALL, 54.3, 31.3 - HELD_GB),
]


@pytest.mark.parametrize(("tokens", "levers", "seconds", "peak_gb"), MEASURED)
def test_what_was_measured_was_to_be_expected(tokens, levers, seconds, peak_gb):
    predicted = memory_plan.peak(SMALL, levers, tokens, 1, H200)
    assert predicted.bytes / 1e9 == pytest.approx(peak_gb, rel=0.02)
    assert step_time.step_time(SMALL, levers, tokens, 1, H200).seconds == pytest.approx(seconds, rel=0.1)


def test_a_layer_keeps_what_the_planner_says():
    """In a process of its own, kernels interpreted: triton decides at its import."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.saved_bytes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for norms, (counted, said) in json.loads(done.stdout).items():
        assert said == pytest.approx(counted, rel=0.03), norms


def test_norms_that_no_kernel_of_ours_computes_keep_more():
    """Gemma's scale by 1 + weight, and stay as the model has them."""
    plain, gemma = (shape_of(QWEN3 | {"model_type": kind}, "m") for kind in ("qwen3", "gemma3_text"))
    ours, theirs = (memory_plan.peak(shape, ALL, 262144, 1, H200).bytes for shape in (plain, gemma))
    assert theirs == memory_plan.peak(plain, dataclasses.replace(ALL, own_kernels=False), 262144, 1, H200).bytes > ours


def test_sizes_are_those_of_the_models():
    assert SMALL.parameters == 596_049_920
    assert EIGHT.parameters == 8_190_735_360
    assert shape_of(QWEN3, "m") == dataclasses.replace(SMALL, trained_positions=40960)


def test_a_model_with_levers_is_counted_as_the_trainer_counts_it():
    """What is written twice for want of torch: host memory that offload takes, an adapter's parameters, the head's chunk."""
    from peft import LoraConfig, get_peft_model

    from tests.support.tiny_model import build_model
    from trainers import checkpointing, head

    model = build_model(layers=2, hidden=64)
    shape = shape_of(model.config.to_dict(), "tiny")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for save_attention in (False, True):
        said = memory_plan.host_bytes(shape, Levers(offload=True, save_attention=save_attention), 100, 1)
        assert said == checkpointing.offloaded_bytes(model, 100, 2, save_attention)
    assert (memory_plan.CHUNK_ELEMENTS, memory_plan.KEPT_SHARE) == (head.CHUNK_ELEMENTS, head.KEPT_SHARE)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(4) == trained


WAYS = [Levers(*values) for values in itertools.product((False, True), (False, True), (None, 8192))]


@pytest.mark.parametrize("levers", WAYS, ids=lambda levers: levers.names)
@pytest.mark.parametrize("shape", [SMALL, EIGHT], ids=["0.6b", "8b"])
def test_more_of_anything_needs_no_less(shape, levers):
    def need(levers: Levers, tokens: int, gpus: int = 1) -> int:
        return memory_plan.required_bytes(memory_plan.peak(shape, levers, tokens, gpus, H200), gpus)

    lengths = [1 << power for power in range(12, 21)]
    assert sorted(needs := [need(levers, tokens) for tokens in lengths]) == needs
    times = [step_time.step_time(shape, levers, tokens, 1, H200).seconds for tokens in lengths]
    assert sorted(times) == times
    assert times[-1] > 3 * times[-2], "attention grows with the square"
    for tokens in (65536, 524288):
        plain = need(levers, tokens)
        assert need(dataclasses.replace(levers, mlp_tile_tokens=8192), tokens) <= plain
        assert need(dataclasses.replace(levers, bf16_masters=True), tokens) < plain
        assert need(dataclasses.replace(levers, lora_rank=16, bf16_masters=True), tokens) < plain
        for shared in ({"cp_size": 8}, {"sp_size": 8}, {"cp_size": 2, "sp_size": 4}):
            assert need(dataclasses.replace(levers, **shared), tokens, 8) < need(levers, tokens, 8)
        eager = dataclasses.replace(levers, own_kernels=False)
        assert need(eager, tokens) >= plain


def test_levers_move_what_they_are_for():
    def at(**fields) -> memory_plan.Peak:
        return memory_plan.peak(SMALL, Levers(**fields), 262144, 1, H200)

    layers = 28 * 262144 * 1024 * 2
    assert at(offload=True).host_bytes == layers
    assert at(offload=True).moments["head"] == at().moments["head"] - layers + layers // 14, "two layers' stay"
    assert at(save_attention=True).moments["head"] - at().moments["head"] == 28 * 262144 * (2048 * 2 + 16 * 4)
    tiled, whole = at(mlp_tile_tokens=8192).moments, at().moments
    assert whole["mlp"] - tiled["mlp"] > 5 * 262144 * 3072 * 2
    assert tiled["attention"] == whole["attention"]


def test_eight_gpus_take_a_million_tokens():
    """The goal for an 8B model is 260 s, by FlashAttention; cuDNN alone does not reach it."""
    levers = dataclasses.replace(ALL, cp_size=8)
    peak = memory_plan.peak(EIGHT, levers, 1 << 20, 8, H200)
    assert memory_plan.required_bytes(peak, 8) < 60 * 2**30
    flash, cudnn = (step_time.step_time(EIGHT, levers, 1 << 20, 8, H200, kernel).seconds for kernel in ("flash", "cudnn"))
    assert flash < 260 < cudnn < 300


def test_rates_between_measured_lengths():
    table = {1024: 100.0, 4096: 200.0}
    rates = [step_time.rate(table, tokens) / 1e12 for tokens in (10, 1024, 2048, 4096, 10**6)]
    assert rates == pytest.approx([100, 100, 150, 200, 200])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 128}, "a mixture of experts .num_experts=128."),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ({"intermediate_size": None}, "has no intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: it must be a whole number"),
        ({"hidden_size": True}, "hidden_size=True: it must be a whole number"),
        ({"head_dim": "x"}, "head_dim='x': it must be a whole number"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn': it must be an object"),
        ({"text_config": [1]}, "text_config=.1.: it must be an object"),
        ({"layer_types": "sliding"}, "layers of type sliding"),
    ],
)
def test_a_shape_that_is_not_known_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(QWEN3 | change, "m")


@pytest.mark.parametrize(
    ("shape", "levers", "gpus", "message"),
    [
        (SMALL, Levers(cp_size=4), 6, "4 ranks, and 6 GPUs do not divide"),
        (SMALL, Levers(sp_size=3), 3, "3 does not divide 16 attention heads"),
        (dataclasses.replace(SMALL, window=4096), Levers(cp_size=2), 2, "sliding window of 4096 tokens"),
    ],
)
def test_a_run_that_could_not_be_is_refused(shape, levers, gpus, message):
    with pytest.raises(ConfigError, match=message):
        memory_plan.peak(shape, levers, 65536, gpus, H200)


def test_a_config_is_read_from_a_folder_or_by_itself(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_shape(str(tmp_path)) == read_shape(str(tmp_path / "config.json")) == shape_of(QWEN3, "m")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="name a model's folder"):
        read_shape(str(tmp_path / "nothing"))


def test_vision_models_are_planned_by_their_text():
    config = {"model_type": "qwen3_vl", "text_config": QWEN3 | {"model_type": "qwen3"}, "tie_word_embeddings": False}
    assert shape_of(config, "m") == dataclasses.replace(shape_of(QWEN3, "m"), tied=False)


def test_the_planner_imports_no_torch():
    code = "import sys, trainers.memory_plan, trainers.step_time, flows.plan_memory, flows.plan_memory_cli\n"
    code += "sys.exit(', '.join({'torch', 'transformers', 'prefect', 'mlflow'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
