"""Each layer's MLP over slices of the sequence, so that its [T, intermediate] tensors never exist whole.

    hidden [1, T, H] ─split─▶ tiles ─▶ checkpoint(mlp) each ─▶ joined [1, T, H]

At long sequences these tensors are what a layer needs most memory for while it is computed again in the backward: four of them,
T × intermediate each. An MLP acts on every token alone, so slices give the same values; gradients of its weights are summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
        mlp.forward = _Tiled(mlp.forward, tile_tokens)  # type: ignore[method-assign]


class _Tiled:
    """A forward in tiles. Between forward and backward a tile keeps its input alone."""

    def __init__(self, forward: Any, tile_tokens: int) -> None:
        self.forward, self.tile_tokens = forward, tile_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-2] <= self.tile_tokens:
            return self.forward(hidden)
        tiles = [checkpoint(self.forward, tile, use_reentrant=False) for tile in hidden.split(self.tile_tokens, -2)]
        return torch.cat(tiles, -2)  # type: ignore[arg-type]
