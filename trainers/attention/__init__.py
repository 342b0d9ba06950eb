"""Attention for packed rows: one implementation registered with transformers, its backend chosen at start.

    model(input_ids [1, T], position_ids [1, T], packed_layout=PackedLayout) → each layer calls `packed_attention` → backend

The implementation is registered with `AttentionInterface` only. Transformers skips mask making for a name its
`AttentionMaskInterface` does not know, and with it a device synchronisation per forward.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trainers.attention.backends import DENSE_TOKENS, Backend, choose_backend, reference
from trainers.attention.layout import PackedLayout
from trainers.errors import ConfigError

__all__ = ["NAME", "Backend", "PackedLayout", "check_supported", "install", "reference"]

NAME = "loopwright_packed"
logger = logging.getLogger(__name__)
_backend = Backend("reference", "default", reference)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within segments. query [1, Hq, T, D], key and value [1, Hk, T, D] → [1, T, Hq, D].

    Raises:
        ConfigError: the layer asks for something packed attention does not compute.
    """
    if packed_layout is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention: this model cannot run packed rows"
        )
    _refuse(module, packed_layout.max_seqlen, kwargs, dropout)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Master weights in float32 are also run as they are, by the check of the head at start; flash kernels refuse that type.
    fn = _backend.fn if q.dtype in (torch.bfloat16, torch.float16) else reference
    if fn is not reference and _backend.dense and packed_layout.segments == 1 and packed_layout.max_seqlen >= DENSE_TOKENS:
        fn = _backend.dense
    return fn(q, k, v, packed_layout, scale).unsqueeze(0), None


def _refuse(module: nn.Module, longest: int, kwargs: dict[str, Any], dropout: float) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and longest > window:
        raise ConfigError(
            f"{type(module).__name__} has a sliding window of {window} tokens and a sequence has {longest}: not supported yet"
        )
    if kwargs.get("softcap") is not None:
        raise ConfigError(f"{type(module).__name__} soft-caps its attention scores: not supported yet")
    if kwargs.get("s_aux") is not None:
        raise ConfigError(f"{type(module).__name__} has attention sinks: not supported yet")
    if dropout:
        raise ConfigError(
            f"attention dropout is {dropout}: the policy must be the one that was sampled; set attention_dropout to 0"
        )


def check_supported(model: nn.Module, longest: int | None = None) -> None:
    """Refuse a model with layers that packed attention cannot compute, before any work starts.

    Args:
        longest: most tokens a sequence may have, if known; a sliding window at least that long never matters.

    Raises:
        ConfigError: names the layer and what it has.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(strange))}: only attention layers can run packed rows"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"{type(model).__name__} soft-caps its attention scores (attn_logit_softcapping): not supported yet")
    window = getattr(config, "sliding_window", None)
    if window and not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True):
        _check_window("every layer", window, longest)
    for name, module in model.named_modules():
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int) and window > 0:
            _check_window(f"layer {name}", window, longest)


def _check_window(layer: str, window: int, longest: int | None) -> None:
    if longest is None or longest > window:
        limit = "sequences may be longer" if longest is None else f"sequences may have {longest}"
        raise ConfigError(f"{layer} has a sliding window of {window} tokens and {limit}: not supported yet")


def install(device: torch.device, dtype: torch.dtype, *, log: bool = True) -> Backend:
    """Choose the backend and say in one log line which runs and why."""
    global _backend
    _backend = choose_backend(device, dtype)
    if log:
        logger.info("attention backend: %s (%s)", _backend.name, _backend.reason)
    return _backend


AttentionInterface.register(NAME, packed_attention)
