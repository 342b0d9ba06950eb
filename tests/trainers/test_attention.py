"""Packed rows give every sample exactly what its own forward gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.fake_source import make_samples
from tests.support.policies import grpo_config, tiny_policy
from tests.support.tiny_model import build_model
from trainers import attention
from trainers.attention import PackedLayout, reference
from trainers.batch import PackedBatch
from trainers.errors import ConfigError
from trainers.packing import pack_row

CPU = torch.device("cpu")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_logprobs_and_gradients_equal_each_samples_own_forward(checkpointing, tied):
    samples = make_samples(seed=3, step=1, count=6)
    policy = tiny_policy(grpo_config(gradient_checkpointing=checkpointing, temperature=0.7), torch.float64, tied=tied)
    batch = PackedBatch.from_row(pack_row(samples), CPU, torch.float64)
    logprobs = policy(batch)[0]
    weights = torch.randn(batch.terms, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (logprobs * weights).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}

    plain = build_model(0, tied).double()
    plain.set_attn_implementation("sdpa")  # eager takes its softmax in float32
    expected = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()[None]
        scores = (plain(input_ids=ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        expected.append(scores[torch.from_numpy(sample.loss_mask[1:])])
    own = torch.cat(expected)
    (own * weights).sum().backward()

    np.testing.assert_allclose(logprobs.detach().numpy(), own.detach().numpy(), atol=1e-9)
    for name, parameter in plain.named_parameters():
        np.testing.assert_allclose(packed[name].numpy(), parameter.grad.numpy(), atol=1e-9, err_msg=name)


def test_a_segment_does_not_see_its_neighbours():
    layout = PackedLayout.from_numpy(np.array([0, 3, 8]), "cpu")
    q, k, v = torch.randn(3, 8, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)
    whole = reference(q, k, v, layout, 0.25)
    alone = reference(q[3:], k[3:], v[3:], PackedLayout.from_numpy(np.array([0, 5]), "cpu"), 0.25)
    torch.testing.assert_close(whole[3:], alone)
    # Softmax by hand for the last token of the first segment.
    weights = torch.einsum("hd,khd->hk", q[2] * 0.25, k[:3]).softmax(-1)
    torch.testing.assert_close(whole[2], torch.einsum("hk,khd->hd", weights, v[:3]))


def test_an_empty_row_gives_a_zero_gradient_to_every_parameter():
    policy = tiny_policy()
    batch = PackedBatch.from_row(pack_row([]), CPU)
    outputs = policy(batch)
    assert batch.terms == 0 and all(len(output) == 0 for output in outputs)
    outputs.logprobs.sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def _llama(**changes):
    model = build_model()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("changes", "longest", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, None, "linear_attention"),
        ({"attn_logit_softcapping": 50.0}, None, "soft-caps"),
        ({"sliding_window": 8}, None, "sliding window of 8"),
        ({"sliding_window": 8}, 9, "sequences may have 9"),
    ],
)
def test_a_model_that_packed_attention_cannot_compute_is_refused_with_the_reason(changes, longest, message):
    with pytest.raises(ConfigError, match=message):
        attention.check_supported(_llama(**changes), longest)


def test_a_window_no_sequence_can_exceed_is_accepted():
    attention.check_supported(_llama(sliding_window=8), longest=8)


def test_the_layer_itself_refuses_what_it_cannot_compute():
    layout = PackedLayout.from_numpy(np.array([0, 4]), "cpu")
    x = torch.zeros(1, 2, 4, 16)
    module = torch.nn.Identity()
    for extra, message in (
        ({"sliding_window": 3}, "sliding window of 3"),
        ({"softcap": 30.0}, "soft-caps"),
        ({"s_aux": x}, "sinks"),
        ({"dropout": 0.1}, "dropout"),
    ):
        with pytest.raises(ConfigError, match=message):
            attention.packed_attention(module, x, x, x, packed_layout=layout, **extra)
    with pytest.raises(ConfigError, match="does not pass keyword arguments on"):
        attention.packed_attention(module, x, x, x)


def test_the_choice_and_its_reason_are_one_log_line(caplog):
    with caplog.at_level("INFO"):
        attention.install(CPU, torch.float32)
    assert [record.getMessage() for record in caplog.records] == ["attention backend: reference (device is cpu)"]


def test_a_model_whose_logits_are_not_plain_is_refused():
    class Scaled(type(build_model())):
        def forward(self, **kwargs):
            output = super().forward(**kwargs)
            output.logits = output.logits * 0.5
            return output

    model = build_model()
    model.__class__ = Scaled
    model.set_attn_implementation(attention.NAME)
    from tests.support.policies import ONE_RANK
    from trainers.model import build_policy

    with pytest.raises(ConfigError, match="computes its logits in a way"):
        build_policy(model, grpo_config(), ONE_RANK)
