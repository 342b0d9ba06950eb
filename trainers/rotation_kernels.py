"""The rotary embedding of queries and keys in one pass each way, by Triton kernels.

    x [1, heads, T, D] ─▶ round(x · cos) + round(rotate_half(x) · sin)         backward: the same with the rotation turned back

As models write it, it is seven operators with a copy of half the tensor, an eighth of all bytes that a layer moves between its
matrix products. Values are rounded where the models' own operators round them.
`TRITON_INTERPRET=1` runs both on a CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainers import kernel_trial

try:
    import triton
    import triton.language as tl
except ImportError:  # the rotation then stays as the model has it
    triton = None

ELEMENTS = 4096  # that a program holds at a time
NAME = "apply_rotary_pos_emb"  # of the function, in the module of a model that calls it
Pair = tuple[torch.Tensor, torch.Tensor]

if triton is not None:

    @triton.jit
    def _rotate(
        x, cos, sin, y, rows, heads, half,
        BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < half)[None, :]
        place = row.to(tl.int64)[:, None] * (2 * half) + column[None, :]
        angle = (row // heads).to(tl.int64)[:, None] * (2 * half) + column[None, :]
        first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
        cos_first = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
        kind = y.dtype.element_ty
        if BACKWARD:
            turned_first = second * sin_second
            turned_second = -first * sin_first
        else:
            turned_first = -second * sin_first
            turned_second = first * sin_second
        out_first = (first * cos_first).to(kind).to(tl.float32) + turned_first.to(kind).to(tl.float32)
        out_second = (second * cos_second).to(kind).to(tl.float32) + turned_second.to(kind).to(tl.float32)
        tl.store(y + place, out_first.to(kind), mask=inside)
        tl.store(y + place + half, out_second.to(kind), mask=inside)


def can_fuse(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel takes queries or keys [1, heads, T, D], laid out as [T, heads, D], and angles [1, T, D]."""
    if triton is None or x.dtype == torch.float64 or not x.dtype == cos.dtype == sin.dtype:
        return False
    if x.dim() != 4 or len(x) != 1 or x.shape[-1] % 2 or cos.shape != (1, x.shape[2], x.shape[3]) or cos.requires_grad:
        return False
    return kernel_trial.takes(x)


def _run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """As [1, heads, T, D] that lies as [T, heads, D], whatever the layout of `x`."""
    assert triton is not None, "asked without can_fuse"
    x = x.transpose(1, 2).contiguous()
    y = torch.empty_like(x)
    _, tokens, heads, width = x.shape
    columns = triton.next_power_of_2(width // 2)
    height = max(1, ELEMENTS // columns)
    grid = (-(-tokens * heads // height),)
    if tokens:
        sizes = {"BACKWARD": backward, "ROWS": height, "COLUMNS": columns}
        _rotate[grid](x, cos.contiguous(), sin.contiguous(), y, tokens * heads, heads, width // 2, **sizes)
    return y.transpose(1, 2)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _run(x, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _run(grads[0], *ctx.saved_tensors, backward=True), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x · cos + rotate_half(x) · sin, differentiable in x. Shapes as in `can_fuse`."""
    return _Rotation.apply(x, cos, sin)  # type: ignore[return-value]


class _Fused:
    """A model's own function, or the kernel where that takes what it is given."""

    def __init__(self, own: Callable[..., Pair]) -> None:
        self.own = own

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **kwargs: Any) -> Pair:
        if not kwargs and can_fuse(q, cos, sin) and can_fuse(k, cos, sin):
            return rotate(q, cos, sin), rotate(k, cos, sin)
        return self.own(q, k, cos, sin, **kwargs)


def works(device: torch.device) -> bool:
    """Whether the kernel compiles and computes the right values on this GPU; the log says why not."""

    def difference() -> float:
        generator = torch.Generator().manual_seed(0)
        x, slopes = (torch.randn(1, 3, 20, 32, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        cos, sin = (torch.randn(1, 20, 32, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        results = []
        for turn in (rotate, _by_operators):
            leaf = x.clone().requires_grad_()
            out = turn(leaf, cos, sin)
            results.append(torch.cat([out.detach(), *torch.autograd.grad(out, leaf, slopes)]).float())
        return float((results[0] - results[1]).norm() / results[1].norm())

    return kernel_trial.passed("rotary embeddings", difference)


def _by_operators(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def enable(model: nn.Module) -> int:
    """Have the attention layers of `model` rotate by the kernel. Returns how many modules of models were changed.

    A model calls its rotation by a name of the Python module that it is written in: that is the one place where it can be
    exchanged, for every model of that module. A rotation of another kind gives other values on a probe and stays.
    """
    places = {sys.modules[type(module).__module__] for module in model.modules()}
    count = 0
    for place in places:
        own = getattr(place, NAME, None)
        if own is None or isinstance(own, _Fused):
            continue
        if _is_plain(own):
            setattr(place, NAME, _Fused(own))
            count += 1
    return count


def _is_plain(own: Callable[..., Any]) -> bool:
    """Whether a function turns the two halves of every head by cos and sin of the whole width."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))
    try:
        found = own(q, k, cos, sin)
    except Exception:  # it takes other arguments
        return False
    return isinstance(found, tuple) and all(
        torch.allclose(a, _by_operators(x, cos, sin), atol=1e-5) for a, x in zip(found, (q, k), strict=True)
    )
