"""Each layer's MLP over slices of the sequence, so that its [T, intermediate] tensors never exist whole.

    forward    hidden [1, T, H] ─_Begin─▶ ─_Tiles─▶ mlp of one slice after the other, no graph ─▶ [1, T, H]
    backward   _Tiles: slice by slice, mlp again with a graph, its gradients; the weights' are summed in float32

At long sequences these tensors are what a layer needs most memory for while it is computed again in the backward: four of them,
T × intermediate each. An MLP acts on every token alone, so slices give the same values.

Two nodes, because gradient checkpointing stops computing a layer again as soon as it has all that the layer's backward will
ask for. `_Begin` keeps the input, before any slice runs: where nothing after the MLP is kept, its slices do not run once more
for an output that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainers.errors import ConfigError

_NAMES = ("mlp", "feed_forward")


def enable(model: nn.Module, layers: list[nn.Module], tile_tokens: int) -> None:
    """Make the MLP of each of `layers` work in tiles.

    Args:
        tile_tokens: tokens of one tile.

    Raises:
        ConfigError: a layer has no MLP that acts on every token alone.
    """
    for layer in layers:
        mlp = next((getattr(layer, name) for name in _NAMES if isinstance(getattr(layer, name, None), nn.Module)), None)
        if mlp is None:
            raise ConfigError(f"mlp_tile_tokens: {type(layer).__name__} of {type(model).__name__} has no `mlp`; leave it out")
        if any(hasattr(mlp, name) for name in ("experts", "router", "gate")):
            raise ConfigError(
                f"mlp_tile_tokens: {type(mlp).__name__} is a mixture of experts, whose router counts over the whole sequence; "
                "leave it out"
            )
        mlp.forward = _Tiled(mlp, tile_tokens)  # type: ignore[method-assign]


class _Tiled:
    """A forward in tiles. Between forward and backward the MLP keeps its input alone."""

    def __init__(self, mlp: nn.Module, tile_tokens: int) -> None:
        self.mlp, self.forward, self.tile_tokens = mlp, mlp.forward, tile_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-2] <= self.tile_tokens:
            return self.forward(hidden)
        if not torch.is_grad_enabled():
            return _run(self, hidden)
        # With a frozen embedding the first layer's input asks for no gradient, and no node would keep it.
        begun = _Begin.apply(hidden if hidden.requires_grad else hidden.detach().requires_grad_())
        return _Tiles.apply(begun, self, *self.trained())  # type: ignore[return-value]

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.mlp.parameters() if parameter.requires_grad]


def _run(tiled: _Tiled, hidden: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden)
    for source, target in zip(hidden.split(tiled.tile_tokens, -2), out.split(tiled.tile_tokens, -2), strict=True):
        target.copy_(tiled.forward(source))
    return out


class _Begin(torch.autograd.Function):
    """The identity; keeps its input for the tiles' backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: torch.Tensor, tiled: _Tiled, *trained: nn.Parameter) -> torch.Tensor:
        ctx.begin, ctx.tiled, ctx.device, ctx.random = begun.grad_fn, tiled, begun.device, _random_state(begun.device)
        return _run(tiled, begun)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tiled: _Tiled = ctx.tiled
        (hidden,) = ctx.begin.saved_tensors
        trained = tiled.trained()
        d_hidden, sums = torch.empty_like(hidden), [_sum_of(parameter) for parameter in trained]
        size = tiled.tile_tokens
        with _as_then(ctx.random, ctx.device), torch.enable_grad():
            for source, target, slope in zip(*(x.split(size, -2) for x in (hidden, d_hidden, grads[0])), strict=True):
                tile = source.detach().requires_grad_()
                found = torch.autograd.grad(tiled.forward(tile), [tile, *trained], slope)
                target.copy_(found[0])
                for total, part in zip(sums, found[1:], strict=True):
                    total += part
        return d_hidden, None, *(total.to(p.dtype) for total, p in zip(sums, trained, strict=True))


def _sum_of(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for the sum of a parameter's gradients: in float32 where bfloat16 would lose small contributions."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _random_state(device: torch.device) -> list[torch.Tensor]:
    """Of the host and of a GPU: an adapter's dropout must drop the same elements again."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def _as_then(state: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Random numbers as they were drawn from `state` on; those of the caller go on as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], device)
        yield
