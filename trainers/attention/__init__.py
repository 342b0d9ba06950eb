"""Attention for packed rows: one implementation registered with transformers, its backend chosen at start.

    model(input_ids [1, t], position_ids [1, t], packed_layout=PackedLayout) → each layer calls `packed_attention` → backend
                       └─ t of the row's T tokens where ranks share it: Ulysses goes around the backend, the ring in its place

The implementation is registered with `AttentionInterface` only. Transformers skips mask making for a name its
`AttentionMaskInterface` does not know, and with it a device synchronisation per forward.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trainers.attention import ring
from trainers.attention.backends import DENSE_TOKENS, Backend, choose_backend, reference
from trainers.attention.blocks import choose_blocks
from trainers.attention.layout import PackedLayout
from trainers.attention.ulysses import attend_over_heads
from trainers.errors import ConfigError
from trainers.sequence_parallel import SequenceParallel

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
    """Causal attention within segments. query [1, Hq, t, D], key and value [1, Hk, t, D] → [1, t, Hq, D]; t = T on one rank.

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
    ranks = packed_layout.sequence or SequenceParallel()
    attend = partial(_attend_on_ring if ranks.cp.size > 1 else _attend, layout=packed_layout, scale=scale)
    out = attend_over_heads(attend, q, k, v, ranks.sp) if ranks.sp.size > 1 else attend(q, k, v)
    return out.unsqueeze(0), None


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    """The whole row here, by the backend of this run."""
    # Master weights in float32 are also run as they are, by the check of the head at start; flash kernels refuse that type.
    fn = _backend.fn if q.dtype in (torch.bfloat16, torch.float16) else reference
    if fn is not reference and _backend.dense and layout.segments == 1 and layout.max_seqlen >= DENSE_TOKENS:
        fn = _backend.dense
    return fn(q, k, v, layout, scale)


def _attend_on_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    """A row of one sequence that is spread over the ranks of `cp`."""
    assert layout.sequence is not None
    if layout.segments > 1:
        raise ConfigError(
            f"cp_size={layout.sequence.cp.size} with a row of {layout.segments} sequences: ring attention runs one a row. "
            "Put one into each (packing=false), or share rows by sp_size, which packs"
        )
    if k.shape != v.shape:
        raise ConfigError(
            f"cp_size={layout.sequence.cp.size}: keys have {k.shape[-1]} numbers a head and values {v.shape[-1]}, and ring "
            "attention sends them as one; share rows by sp_size"
        )
    return ring.ring_attention(q, k, v, scale, ring.ring_of(layout.sequence.cp))[0]


def _refuse(module: nn.Module, longest: int, kwargs: dict[str, Any], dropout: float) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and longest > window:
        raise ConfigError(
            f"{type(module).__name__} has a sliding window of {window} tokens and a sequence has {longest}: not supported yet"
        )
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ConfigError(f"{type(module).__name__} attends to later tokens too (is_causal is false): rows are causal here")
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


def check_shared(model: nn.Module, ranks: SequenceParallel, longest: int | None = None) -> None:
    """Refuse a model whose rows these ranks cannot share. `longest` as in `check_supported`.

    Raises:
        ConfigError: says what of the model it is, and what to write instead.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    heads = config.num_attention_heads
    if heads % ranks.sp.size:
        fitting = ", ".join(str(size) for size in range(2, heads + 1) if heads % size == 0)
        raise ConfigError(
            f"sp_size={ranks.sp.size} does not divide the {heads} attention heads of {type(model).__name__}: write one of "
            f"{fitting or 'none'}, and the rest as cp_size"
        )
    kinds = {"sliding_attention", "chunked_attention"} & set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if ranks.cp.size > 1 and kinds and (longest is None or window is None or longest > window):
        raise ConfigError(
            f"cp_size={ranks.cp.size}: {type(model).__name__} has layers of type {', '.join(sorted(kinds))}, and ring "
            f"attention knows no windows: write cp_size=1 and max_length up to {window}, or use a model with full attention"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    types = {rope.get("rope_type") for rope in [ropes, *ropes.values()] if isinstance(rope, dict)}
    if varying := types & {"dynamic", "longrope"}:
        raise ConfigError(
            f"cp_size × sp_size = {ranks.size}: {type(model).__name__} has rotary embeddings of type {varying.pop()}, which "
            "follow the longest position that a rank sees, and each sees a part of the row: write rope_parameters="
            "{rope_type: yarn, factor: auto}"
        )


def _check_window(layer: str, window: int, longest: int | None) -> None:
    if longest is None or longest > window:
        limit = "sequences may be longer" if longest is None else f"sequences may have {longest}"
        raise ConfigError(f"{layer} has a sliding window of {window} tokens and {limit}: not supported yet")


def install(device: torch.device, dtype: torch.dtype, *, log: bool = True, on_ring: bool = False) -> Backend:
    """Choose the backend and say in one log line which runs and why; with `on_ring`, the blocks of ring attention too."""
    global _backend
    _backend = choose_backend(device, dtype)
    if log:
        logger.info("attention backend: %s (%s)", _backend.name, _backend.reason)
    if on_ring:
        blocks = choose_blocks(device.type, dtype)
        if log:
            logger.info("blocks of ring attention: %s (%s)", blocks.long.name, blocks.reason)
    return _backend


AttentionInterface.register(NAME, packed_attention)
