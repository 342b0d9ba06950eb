"""Causal attention within the segments of a packed row, by whichever implementation the machine has.

Every backend is a function (query [T, Hq, D], key [T, Hk, D], value [T, Hk, D], layout, scale) → [T, Hq, D], differentiable.
`reference` is exact on any device and dtype and is the oracle of the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainers.attention.layout import PackedLayout

AttentionFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedLayout, float], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    reason: str  # why this one, for the log
    fn: AttentionFn
    dense: AttentionFn | None = None  # faster on a row of one long segment


DENSE_TOKENS = 1 << 15  # a row of one segment this long goes to `dense`: its kernel is planned anew for every length


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    """Segments padded into a batch [S, H, L, D], causal scaled-dot-product attention, padding dropped again.

    Padding follows a segment's tokens, so causality alone keeps it out of every real token's keys.
    """

    def pad(x: torch.Tensor) -> torch.Tensor:
        grid = x.new_zeros(layout.segments * layout.max_seqlen, *x.shape[1:])
        grid = grid.index_copy(0, layout.pad_index, x)
        return grid.view(layout.segments, layout.max_seqlen, *x.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).reshape(-1, *q.shape[1:]).index_select(0, layout.pad_index)


def _from_flash(varlen_func: Callable[..., Any]) -> AttentionFn:
    """A function of flash-attn's variable-length interface (its versions 2, 3 and 4 and aiter share these arguments)."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
        out = varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=layout.max_seqlen,
            softmax_scale=scale,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return fn


def _hub_kernel() -> Backend:
    """FlashAttention from the kernels hub: version 3 on Hopper, 4 on Blackwell, aiter on ROCm, 2 elsewhere."""
    major = torch.cuda.get_device_capability()[0]
    # Pinned to the interface version this code was written for.
    if torch.version.hip:
        repo, version, why = "kernels-community/aiter-flash-attn", 2, "ROCm"
    elif major == 9:
        repo, version, why = "kernels-community/flash-attn3", 1, "Hopper"
    elif major in (10, 11):
        repo, version, why = "kernels-community/flash-attn4", 0, "Blackwell"
    else:
        repo, version, why = "kernels-community/flash-attn2", 1, f"compute capability {major}.x"
    kernel = importlib.import_module("kernels").get_kernel(repo, version=version)
    return Backend(f"kernels:{repo}", f"hub kernel for {why}", _from_flash(kernel.flash_attn_varlen_func))


def _installed_flash() -> Backend:
    # Newest first; `flash_attn_interface` is FlashAttention 3's module, `flash_attn.cute` version 4's.
    wanted = ["flash_attn.cute", "flash_attn"] if torch.cuda.get_device_capability()[0] >= 10 else ["flash_attn"]
    if torch.cuda.get_device_capability()[0] == 9:
        wanted = ["flash_attn_interface", *wanted]
    errors = []
    for name in wanted:
        try:
            module = importlib.import_module(name)
            return Backend(
                name,
                f"installed version {getattr(module, '__version__', 'unknown')}",
                _from_flash(module.flash_attn_varlen_func),
            )
        except (ImportError, AttributeError, OSError) as error:
            errors.append(f"{name}: {error}")
    raise ImportError("; ".join(errors))


def _torch_varlen() -> Backend:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 infers grouped heads; later versions want to be told. A window of (-1, 0) is causal, aligned bottom-right,
    # which equals top-left as queries and keys are the same tokens.
    grouped = "enable_gqa" in (varlen_attn.__kwdefaults__ or {})

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
        extra: dict[str, Any] = {"enable_gqa": True} if grouped and q.shape[1] != k.shape[1] else {}
        cu, longest = layout.cu_seqlens, layout.max_seqlen
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0), **extra)
        assert isinstance(out, torch.Tensor), "asked for the output alone"
        return out

    return Backend("varlen", f"torch {torch.__version__}'s own variable-length attention", fn)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    """One segment, by cuDNN: on Hopper nearly twice as fast as torch's variable-length attention."""
    assert layout.segments == 1, f"{layout.segments} segments for an attention without any"
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _flex() -> Backend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
        tokens = q.shape[0]
        # Rows differ in length; a multiple of the mask's block keeps the number of compiled shapes small.
        padded = -(-tokens // 128) * 128
        if layout.block_mask is None:
            position = torch.arange(padded, device=q.device, dtype=torch.int32)
            segment = torch.searchsorted(layout.cu_seqlens, position, right=True)

            def mask(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
                return (segment[i] == segment[j]) & (i >= j)

            layout.block_mask = create_block_mask(mask, None, None, padded, padded, device=str(q.device))
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padded - tokens)).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = compiled(q, k, v, block_mask=layout.block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)[:tokens]  # type: ignore[index]

    return Backend("flex", "compiled flex attention", fn)


def _works(fn: AttentionFn, dtype: torch.dtype, cu_seqlens: tuple[int, ...] = (0, 37, 60)) -> None:
    """Run forward and backward on short segments with grouped heads and compare with `reference`.

    Raises:
        RuntimeError: the backend's numbers are wrong.
        Exception: whatever the backend raises on this machine.
    """
    import numpy as np

    generator = torch.Generator(device="cuda").manual_seed(0)
    layout = PackedLayout.from_numpy(np.array(cu_seqlens), "cuda")
    shapes = [(cu_seqlens[-1], heads, 64) for heads in (4, 2, 2)]
    q, k, v = inputs = [torch.randn(s, device="cuda", dtype=dtype, generator=generator).requires_grad_() for s in shapes]
    expected = reference(q, k, v, layout, 0.125)
    wanted = torch.autograd.grad(expected.float().square().sum(), inputs)
    got = fn(q, k, v, layout, 0.125)
    grads = torch.autograd.grad(got.float().square().sum(), inputs)
    for a, b in zip([got, *grads], [expected, *wanted], strict=True):
        difference = ((a - b).float().norm() / b.float().norm()).item()
        if not difference < 0.03:
            raise RuntimeError(f"differs from the reference by {difference:.3g} of its norm")


def _long_rows(backend: Backend, dtype: torch.dtype) -> tuple[AttentionFn | None, str]:
    """What runs rows of one long segment, and a word on it for the log."""
    if backend.name.startswith(("kernels:", "flash_attn")):
        return None, "long rows too"
    try:
        _works(_cudnn, dtype, (0, 256))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:120]
        return None, f"long rows too, not cuDNN: {type(error).__name__}: {first}"
    return _cudnn, f"rows of one segment from {DENSE_TOKENS} tokens by cuDNN"


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The first backend that works here. `dtype` is the type attention runs in (bfloat16 under mixed precision).

    Order on a GPU: kernels hub, installed flash-attention, torch varlen attention, flex attention, reference. Each is tried
    on a small example first, because a kernel that imports may still not run on the device or without network.
    """
    if device.type != "cuda":
        return Backend("reference", f"device is {device.type}", reference)
    if dtype not in (torch.bfloat16, torch.float16):
        return Backend("reference", f"flash kernels take bfloat16 or float16 only, this run computes in {dtype}", reference)
    refused: list[str] = []
    for make in (_hub_kernel, _installed_flash, _torch_varlen, _flex):
        try:
            backend = make()
            _works(backend.fn, dtype)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:120]
            refused.append(f"{make.__name__.strip('_')}: {type(error).__name__}: {first}")
            continue
        dense, reason = _long_rows(backend, dtype)
        return Backend(backend.name, "; ".join([backend.reason, *(f"not {r}" for r in refused), reason]), backend.fn, dense)
    return Backend("reference", "; ".join(f"not {r}" for r in refused), reference)
