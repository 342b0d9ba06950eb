"""Rotary scaling: completed from the model, refused where it contradicts it, and what transformers then computes."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from trainers import rope
from trainers.config import SFTConfig
from trainers.errors import ConfigError
from trainers.model import load_model


def config(**fields) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    return LlamaConfig(
        **sizes, max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, **fields
    )


def test_what_is_left_out_comes_from_the_model_and_the_longest_sequence():
    assert rope.complete(config(), {"rope_type": "yarn", "factor": "auto"}, 4096) == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5e5,
    }  # fmt: skip
    assert rope.complete(config(), {"rope_type": "yarn"}, 512)["factor"] == 1.0
    given = {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 512, "beta_fast": 16, "rope_theta": 5e5}
    assert rope.complete(config(), given, 4096) == {**given, "factor": 8.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_type": "yarn", "rope_theta": 1e6}, "trained with 500000"),
        ({"rope_type": "yarn", "factor": 2}, "set factor to 4 or more"),
        ({"factor": 2}, "no rope_type"),
    ],
)
def test_what_contradicts_the_model_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        rope.complete(config(), given, 4096)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "rope_type is None: write one of yarn"),
        ({"rope_type": "yran"}, "rope_type is 'yran': write one of yarn"),
        ({"rope_typ": "yarn"}, "unknown field `rope_typ`: did you mean `rope_type`"),
        ({"rope_type": "yarn", "factor": "atuo"}, "factor is 'atuo': write a number"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
    ],
)
def test_what_says_nothing_is_refused_where_it_is_written(given, message):
    with pytest.raises(ValidationError, match=message):
        SFTConfig(model="m", dataset={"path": "d"}, rope_parameters=given)


def test_a_run_trains_the_model_with_it(tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    run = SFTConfig(model=str(tmp_path), dataset={"path": "d"}, max_length=2048, rope_parameters={"rope_type": "yarn"})
    model = load_model(run)
    assert model.config.rope_parameters["factor"] == 2.0
    assert model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(2) + 1)


def test_sequences_beyond_the_trained_window_are_told_of_unless_something_scales_them():
    said = rope.beyond(config(), 2048)
    assert said is not None and "max_length=2048: the model was trained for 1024 positions" in said
    assert rope.beyond(config(), 1024) is None
    scaled = config()
    scaled.rope_parameters = rope.complete(scaled, {"rope_type": "yarn"}, 4096)
    assert rope.beyond(scaled, 4096) is None


def test_high_frequencies_stay_and_low_ones_are_stretched():
    """By the paper: a dimension that turns more than 32 times in the trained window keeps its frequency, one that turns less
    than once has it divided by the factor; and attention is scaled by 0.1 ln(factor) + 1."""
    plain = config(head_dim=64)
    stretched = config(head_dim=64)
    stretched.rope_parameters = rope.complete(stretched, {"rope_type": "yarn"}, 4096)
    rotary = LlamaForCausalLM(stretched).model.rotary_emb
    before, after = LlamaForCausalLM(plain).model.rotary_emb.inv_freq, rotary.inv_freq
    turns = 1024 * before / (2 * math.pi)
    torch.testing.assert_close(after[turns > 40], before[turns > 40])
    torch.testing.assert_close(after[turns < 0.8], before[turns < 0.8] / 4)
    assert (turns > 40).any() and (turns < 0.8).any()
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
