"""What saves memory at long sequences changes no number: loss and gradients with each lever, and with all, in float64."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.live_bytes import LiveBytes
from tests.support.policies import ONE_RANK, grpo_config
from tests.support.tiny_model import build_model
from trainers import attention, checkpointing, tiled_mlp
from trainers.batch import PackedBatch
from trainers.errors import ConfigError
from trainers.model import Policy, build_policy, probe_row

TOKENS = 50
LEVERS = [
    dict(zip(("offload", "save_attention", "mlp_tile_tokens"), values, strict=True))
    for values in itertools.product((False, True), (False, True), (None, 16))
]


def policy(layers: int = 3, offload: bool = False, **fields) -> Policy:
    """As a run builds it."""
    attention.install(ONE_RANK.device, torch.float64, log=False)
    model = build_model(seed=3, layers=layers).double()
    model.set_attn_implementation(attention.NAME)
    config = grpo_config(gradient_checkpointing_kwargs={"offload": True} if offload else None, **fields)
    return build_policy(model, config, ONE_RANK, longest=TOKENS)


def loss_and_gradients(policy: Policy, rows: int = 1) -> list[torch.Tensor]:
    """Of `rows` rows forwarded before any is differentiated."""
    tokens = [np.random.default_rng(row).integers(6, 60, TOKENS) for row in range(rows)]
    losses = [-policy(PackedBatch.from_row(probe_row(row), ONE_RANK.device)).logprobs.sum() for row in tokens]
    policy.zero_grad()
    for loss in reversed(losses):
        loss.backward()
    return [torch.stack(losses).detach(), *(parameter.grad.clone() for parameter in policy.parameters())]


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return loss_and_gradients(policy(gradient_checkpointing=False))


@pytest.mark.parametrize("levers", LEVERS, ids=lambda levers: "-".join(k for k, v in levers.items() if v) or "checkpointing")
def test_no_lever_changes_loss_or_gradients(plain, levers):
    trained = policy(**levers)
    for _ in range(2):  # buffers of the first step are used again in the second
        for ours, theirs in zip(loss_and_gradients(trained), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_rows_forwarded_together_come_back_in_reverse():
    levers = {"offload": True, "save_attention": True, "mlp_tile_tokens": 16}
    ours = loss_and_gradients(policy(**levers), rows=3)
    theirs = loss_and_gradients(policy(gradient_checkpointing=False), rows=3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_saved_attention_is_not_run_again():
    runs = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if checkpointing._is_attention(func):
                runs.append(str(func))
            return func(*args, **(kwargs or {}))

    counts = []
    for save_attention in (False, True):
        trained = policy(layers=3, save_attention=save_attention)
        runs.clear()
        with Count():
            loss_and_gradients(trained)
        counts.append(len(runs))
    assert counts == [6, 3], "three layers: forward and recomputation, against the forward alone"


@pytest.mark.parametrize("levers", [{}, {"save_attention": True, "offload": True}], ids=["alone", "with the others"])
def test_a_tile_runs_twice_and_not_a_third_time(levers):
    """In the forward and in its own backward. A layer that is computed again stops at its MLP."""
    trained = policy(layers=3, mlp_tile_tokens=16, **levers)
    runs = []
    for module in trained.modules():
        if isinstance(tiled := module.__dict__.get("forward"), tiled_mlp._Tiled):
            own = tiled.forward
            tiled.forward = lambda tile, own=own: (runs.append(len(tile[0])), own(tile))[1]
    loss_and_gradients(trained)
    assert sum(runs) == 2 * 3 * TOKENS


def test_a_tile_drops_the_same_elements_in_its_backward():
    layer = torch.nn.Module()
    layer.mlp = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 6)).double()
    tiled_mlp.enable(layer, [layer], 4)
    hidden = torch.randn(1, 10, 6, dtype=torch.float64)  # asks for no gradient, as behind a frozen embedding
    torch.manual_seed(5)
    out = layer.mlp(hidden)
    after = torch.rand(3)
    torch.manual_seed(6)
    ours = torch.autograd.grad(out.square().sum(), list(layer.mlp.parameters()))
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(6)))
    torch.manual_seed(5)
    plain = torch.cat([torch.nn.Sequential.forward(layer.mlp, tile) for tile in hidden.split(4, 1)], 1)
    torch.testing.assert_close(torch.rand(3), after)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(ours, torch.autograd.grad(plain.square().sum(), list(layer.mlp.parameters())))


def test_nothing_of_a_layer_is_held_when_its_backward_is_done(monkeypatch):
    """A whole layer's recomputation was: the last layer's saved attention had its graph, and the keeper had that."""
    trained = policy(offload=True, save_attention=True, mlp_tile_tokens=16)
    batch = PackedBatch.from_row(probe_row(np.arange(TOKENS) % 50 + 6), ONE_RANK.device)
    fields = [getattr(batch, name) for name in batch.__dataclass_fields__]
    mode = LiveBytes([x for x in (*trained.parameters(), *fields) if isinstance(x, torch.Tensor)])
    buffer = checkpointing.Keeper._buffer
    monkeypatch.setattr(checkpointing.Keeper, "_buffer", lambda self, tensor: mode.leave_out(buffer(self, tensor)))
    gc.disable()  # what only the collector finds is held
    with mode:
        trained(batch).logprobs.sum().backward()
        held = mode.now - sum(parameter.grad.nbytes for parameter in trained.parameters())
    gc.enable()
    assert held < TOKENS * trained.model.config.hidden_size * 8, "not even a layer's input"


def test_an_offloaded_layer_leaves_nothing_on_the_device(monkeypatch):
    """What is kept is a copy in host memory; one layer ahead of its use it comes back."""
    brought = []
    bring = checkpointing.Keeper._bring
    monkeypatch.setattr(checkpointing.Keeper, "_bring", lambda self, kept: (brought.append(kept), bring(self, kept))[1])
    model = build_model(layers=4).double()
    attention.install(ONE_RANK.device, torch.float64, log=False)
    model.set_attn_implementation(attention.NAME)
    keeper = checkpointing.enable(model, kwargs={"offload": True}, save_attention=False)
    loss = -Policy(model.train())(PackedBatch.from_row(probe_row(np.arange(6, 40)), ONE_RANK.device)).logprobs.sum()
    assert [len(layer) for layer in keeper._layers] == [1] * 4
    assert all(kept.tensor is None for layer in keeper._layers for kept in layer)
    first = keeper._layers[0][0]
    loss.backward()
    assert not keeper._layers and first.tensor is not None
    assert sum(map(len, keeper._free.values())) == 4, "every buffer is free again"
    assert brought.index(first) < len(brought) - 1, "the first layer's was asked for while the second was computed"


def test_the_host_memory_that_offload_takes_is_known_beforehand():
    model = build_model(layers=2, hidden=64)  # two heads of 32
    assert checkpointing.offloaded_bytes(model, 100, 8, save_attention=False) == 2 * 100 * 64 * 8
    assert checkpointing.offloaded_bytes(model, 100, 2, save_attention=True) == 2 * 100 * (64 + 2 * (32 + 2)) * 2


def test_offload_that_does_not_fit_the_host_is_refused():
    with pytest.raises(ConfigError, match="GiB in host memory for rows of 1000000000000 tokens on 2 ranks"):
        checkpointing.check_host_memory(build_model(), 10**12, 2, save_attention=True, ranks_here=2)


@pytest.mark.parametrize("fields", [{"save_attention": True}, {"gradient_checkpointing_kwargs": {"offload": True}}])
def test_keeping_without_checkpointing_is_refused(fields):
    with pytest.raises(ValueError, match="set gradient_checkpointing=true"):
        grpo_config(gradient_checkpointing=False, **fields)


def test_what_cannot_be_tiled_or_saved_is_refused():
    model = build_model()
    with pytest.raises(ConfigError, match="use_reentrant=false"):
        checkpointing.enable(model, kwargs={"use_reentrant": True, "offload": True}, save_attention=False)
    layer = model.model.layers[0]
    layer.mlp.experts = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match="mixture of experts"):
        tiled_mlp.enable(model, [layer], 16)
    del layer.mlp
    with pytest.raises(ConfigError, match="has no `mlp`"):
        tiled_mlp.enable(model, [layer], 16)
