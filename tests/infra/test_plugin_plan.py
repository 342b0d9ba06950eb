"""The plugin's plan recorder on toy layers that load as vLLM's do, and the sparse codec against the trainer's half."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infra.vllm import PLUGIN
from trainers.weight_sync import sparse as encoder

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm import sparse as decoder
from loopwright_vllm.layout import Layout
from loopwright_vllm.plan import Plan, Recorder

HIDDEN = 6


class Fused(nn.Module):
    """q, k and v in one parameter, a padded vocabulary, a transposed weight, a scale of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN, HIDDEN))
        self.embedding = nn.Parameter(torch.zeros(16, HIDDEN))
        self.turned = nn.Parameter(torch.zeros(HIDDEN, 4))
        self.scale = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.float64))

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for at, name in enumerate("qkv"):
            self.qkv.data[at * HIDDEN : (at + 1) * HIDDEN].copy_(weights[name])
        self.embedding.data[:10].copy_(weights["embedding"])
        self.embedding.data[10:].fill_(0)
        self.turned.data.copy_(weights["turned"].t())
        self.scale.data.copy_(weights["scale"])


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys("qkv", (HIDDEN, HIDDEN))
    shapes |= {"embedding": (10, HIDDEN), "turned": (4, HIDDEN), "scale": (HIDDEN,), "unused": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def record(model: nn.Module, load, given: dict[str, torch.Tensor]) -> tuple[Plan | None, str | None]:
    recorder = Recorder()
    for name, tensor in given.items():
        recorder.announce(name, tensor)
    with recorder, torch.no_grad():
        load(given)
    return recorder.plan(model.named_parameters()), recorder.problem


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("through_a_copy", [False, True])
def test_a_replayed_plan_does_what_the_loader_does(through_a_copy):
    """Directly into the parameters, and through a layer that is loaded aside and copied over whole, as at a reload."""
    model, expected = Fused(), Fused()

    def load(given: dict[str, torch.Tensor]) -> None:
        if not through_a_copy:
            model.load(given)
            return
        aside = Fused()
        for parameter in aside.parameters():
            parameter.data = torch.empty_like(parameter)
        aside.load(given)
        for mine, other in zip(model.parameters(), aside.parameters(), strict=True):
            mine.data.copy_(other)

    plan, problem = record(model, load, weights(0))
    assert plan is not None, problem
    assert plan.holds(model.parameters()) and plan.moves["unused"] == []
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    for seed in (1, 2):
        plan.apply(weights(seed))
        expected.load(weights(seed))
        assert equal(model, expected)
    plan.apply({"k": weights(9)["k"]})  # a part of an update
    assert torch.equal(model.qkv[HIDDEN : 2 * HIDDEN], weights(9)["k"]) and torch.equal(model.qkv[:HIDDEN], weights(2)["q"])
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    model.qkv.data = model.qkv.data.clone()
    assert not plan.holds(model.parameters())


def test_tensors_that_lie_in_one_bucket_are_told_apart():
    given, model, expected = weights(0), Fused(), Fused()
    bucket = torch.cat([tensor.flatten() for tensor in given.values()])
    views = dict(zip(given, bucket.split([tensor.numel() for tensor in given.values()]), strict=True))
    views = {name: view.view(given[name].shape) for name, view in views.items()}
    plan, problem = record(model, model.load, views)
    assert plan is not None, problem
    plan.apply(weights(3))
    expected.load(weights(3))
    assert equal(model, expected)


def spoiled(kind: str):
    model = Fused()

    def load(given: dict[str, torch.Tensor]) -> None:
        model.load(given)
        if kind == "derived":
            model.derived = model.qkv.data * 2
        elif kind == "packed":
            model.turned.data.copy_(model.turned.data.clone())
        elif kind == "twice":
            model.embedding.data[0].copy_(given["q"][0])
        elif kind == "read":
            assert not given["q"].isnan().any()
        elif kind == "in place":
            model.scale.data.add_(1)

    return model, load


@pytest.mark.parametrize("kind", ["derived", "packed", "twice", "read", "in place"])
def test_a_load_that_does_more_than_copy_has_no_plan(kind):
    model, load = spoiled(kind)
    plan, problem = record(model, load, weights(0))
    assert plan is None and problem


def test_a_parameter_that_was_not_loaded_whole_has_no_plan():
    model = Fused()

    def load(given: dict[str, torch.Tensor]) -> None:
        model.load(given)

    model.extra = nn.Parameter(torch.zeros(2))
    assert record(model, load, weights(0)) == (None, "extra: an element was written 0 to 0 times")


# Sparse updates ----------------------------------------------------------------------------------------------------------


def patched(old: torch.Tensor, new: torch.Tensor) -> tuple[encoder.Patch, torch.Tensor]:
    """The patch from one bucket of integers to another, and what the server makes of the old one with it."""
    width = old.dtype.itemsize
    old_bytes, new_bytes = old.view(torch.uint8), new.view(torch.uint8)
    patch = encoder.encode(old_bytes, new_bytes, width, encoder.changed_words(old_bytes, new_bytes, width))
    mirror = old_bytes.clone()
    decoder.patch(mirror, width, patch.relative, patch.low, patch.streams)
    return patch, mirror.view(old.dtype)


@settings(max_examples=80, deadline=None)
@given(
    words=st.integers(2, 3000).map(lambda n: 2 * n),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    step=st.sampled_from(["small", "middling", "any", "redrawn"]),
    dtype=st.sampled_from([torch.int16, torch.int32]),
    seed=st.integers(0, 2**31),
)
def test_a_patch_gives_the_new_bucket_bit_by_bit(words, share, step, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    old = torch.randint(info.min, info.max, (words,), generator=generator, dtype=dtype)
    low, high = {"small": (-3, 4), "middling": (-500, 500)}.get(step, (info.min, info.max))
    moved = old + torch.randint(low, high, (words,), generator=generator, dtype=dtype)
    if step == "redrawn":
        moved = (
            torch.randn(words, generator=generator).to(torch.bfloat16 if dtype == torch.int16 else torch.float32).view(dtype)
        )
    new = torch.where(torch.rand(words, generator=generator) < share, moved, old)
    patch, mirror = patched(old, new)
    assert torch.equal(mirror, new)
    assert decoder.checksum(mirror.view(torch.uint8)) == encoder.checksum(new.view(torch.uint8))
    assert [stream.numel() for stream in patch.streams] == patch.sizes


@pytest.mark.parametrize(("change", "most"), [("one step up", 0.016), ("a few steps", 0.016), ("redrawn", 0.026)])
def test_two_per_cent_of_bfloat16_weights_take_under_three_per_cent_of_the_bytes(change, most):
    generator = torch.Generator().manual_seed(0)
    old = (0.02 * torch.randn(1 << 20, generator=generator)).bfloat16()
    drawn = (0.02 * torch.randn(old.numel(), generator=generator)).bfloat16()
    bits = old.view(torch.int16)
    steps = torch.randint(-4, 5, (old.numel(),), generator=generator, dtype=torch.int16)
    moved = {"one step up": bits + 1, "a few steps": bits + steps, "redrawn": drawn.view(torch.int16)}[change]
    new = torch.where(torch.rand(old.numel(), generator=generator) < 0.02, moved, bits)
    patch, mirror = patched(bits, new)
    assert torch.equal(mirror, new)
    assert sum(patch.sizes) < most * old.numel() * 2


def test_a_checksum_sees_a_flipped_bit_and_two_exchanged_words():
    bucket = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    flipped, exchanged = bucket.clone(), bucket.clone().view(torch.int32)
    flipped[1000] ^= 4
    exchanged[[3, 900]] = exchanged[[900, 3]]
    assert len({decoder.checksum(b) for b in (bucket, flipped, exchanged.view(torch.uint8))}) == 3


def streams(gaps: list[int], table: list[int], codes: list[int], low: list[int], rare: list[int]) -> list[torch.Tensor]:
    """Of a patch of 16-bit words whose high parts are whole words."""
    short = [torch.tensor(values, dtype=torch.int16).view(torch.uint8) for values in (table, rare)]
    given, packed, below = (torch.tensor(values, dtype=torch.uint8) for values in (gaps, codes, low))
    return [given, short[0], packed, below, short[1]]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (streams([1, 1], [7], [0, 0], [], []), "2 positions, 2 bytes of codes"),
        (streams([1, 1], [7], [0], [3], []), "1 of low parts"),
        (streams([9, 9, 30], [7], [0, 0], [], []), "does not fit 32 words"),
        (streams([1], [7], [15], [], []), "announces 1 rare values and has 0"),
        (streams([1], [7], [0], [], [4]), "announces 0 rare values and has 1"),
        (streams([1], [7], [1], [], []), "beyond its table of 1"),
    ],
)
def test_streams_that_do_not_fit_are_refused(given, problem):
    bucket = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=problem):
        decoder.patch(bucket, 2, True, 0, given)
    assert not bucket.any()


def test_a_cut_that_no_word_has_is_refused():
    with pytest.raises(ValueError, match="2-byte words cannot have 2 low bytes"):
        decoder.patch(torch.zeros(64, dtype=torch.uint8), 2, True, 2, streams([1], [7], [0], [], []))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([["a", "bfloat16", [4], 0, 0], ["a", "bfloat16", [4], 0, 16]], "names a tensor twice"),
        ([["a", "bfloat16", [4], 1, 0]], "is in no bucket"),
        ([["a", "float32", [4], 0, 2]], "not aligned"),
        ([["a", "float32", [17], 0, 0]], "ends beyond its bucket"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(tensors, problem):
    with pytest.raises(ValueError, match=problem):
        Layout.parse({"id": "x", "buckets": [64], "tensors": tensors})
