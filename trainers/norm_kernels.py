"""RMS norms in one pass over their input each way, by Triton kernels.

    x [R, N] ─▶ y = weight · round(x · rstd), rstd [R] ─▶ … ─▶ dx, Σ over rows of dy · round(x · rstd)

Written as separate operators, as models have them, a norm makes four float32 copies of its input and keeps 6 bytes an element
for its backward; here it keeps its input, which the layer has anyway, and 4 bytes a row. Values are rounded where the models'
own norms round them: once after the division, once after the product with the weight.
`TRITON_INTERPRET=1` runs both on a CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainers import kernel_trial

try:
    import triton
    import triton.language as tl
except ImportError:  # norms then stay as the model has them
    triton = None

ELEMENTS = 4096  # that a program holds at a time, or one row where that is more
PROGRAMS = 528  # of the backward, four a multiprocessor of an H200: each sums the weight's gradient over its rows

if triton is not None:

    @triton.jit
    def _forward(x, weight, y, rstd, rows, columns, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / columns + eps)
        normed = (values * scale[:, None]).to(y.dtype.element_ty).to(tl.float32)
        weights = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        tl.store(y + place, (normed * weights[None, :]).to(y.dtype.element_ty), mask=inside)
        tl.store(rstd + row, scale, mask=row < rows)

    @triton.jit
    def _backward(dy, x, weight, rstd, dx, partial, rows, columns, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        column = tl.arange(0, COLUMNS)
        weights = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        first = tl.program_id(0) * blocks
        for block in range(0, blocks):
            row = (first + block) * ROWS + tl.arange(0, ROWS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            place = row.to(tl.int64)[:, None] * columns + column[None, :]
            scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
            normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
            slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(slope * normed.to(dx.dtype.element_ty).to(tl.float32), 0)
            slope = slope * weights[None, :]
            mean = tl.sum(slope * normed, 1) / columns
            tl.store(dx + place, (scale * (slope - normed * mean[:, None])).to(dx.dtype.element_ty), mask=inside)
        tl.store(partial + tl.program_id(0) * columns + column, total, mask=column < columns)


def can_fuse(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels take this input and weight."""
    if triton is None or x.dtype != weight.dtype or x.dtype == torch.float64:
        return False
    return kernel_trial.takes(x)


def _block(columns: int) -> tuple[int, int]:
    """Rows and columns, powers of two, that a program holds."""
    assert triton is not None, "asked without can_fuse"
    width = triton.next_power_of_2(columns)
    return max(1, ELEMENTS // width), width


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        height, width = _block(columns)
        if rows:
            grid = (-(-rows // height),)
            _forward[grid](x, weight, y, rstd, rows, columns, eps, ROWS=height, COLUMNS=width)  # pyright: ignore
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows, columns = len(rstd), x.shape[-1]
        dy, dx = grads[0].contiguous(), torch.empty_like(x)
        height, width = _block(columns)
        whole = -(-rows // height)
        programs = max(1, min(PROGRAMS, whole))
        partial = torch.zeros(programs, columns, dtype=torch.float32, device=x.device)
        blocks = -(-whole // programs)
        if rows:
            _backward[(programs,)](
                dy, x, weight, rstd, dx, partial, rows, columns, blocks, ROWS=height, COLUMNS=width  # pyright: ignore
            )  # fmt: skip
        return dx, partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · x / √(mean(x²) + eps) over the last dimension, differentiable. x [..., N], weight [N] of the same type."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]


class _Fused:
    """The forward of a norm: by the kernels where they take its input, else the module's own."""

    def __init__(self, module: nn.Module, eps: float) -> None:
        self.module, self.own, self.eps = module, module.forward, eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        return rms_norm(hidden_states, weight, self.eps) if can_fuse(hidden_states, weight) else self.own(hidden_states)


def works(device: torch.device) -> bool:
    """Whether the kernels compile and compute the right values on this GPU; the log says why not."""

    def difference() -> float:
        generator = torch.Generator().manual_seed(0)
        values, slopes, scales = (torch.randn(shape, generator=generator).to(device) for shape in ((40, 96), (40, 96), (96,)))
        found, wanted = [], []
        for results, dtype, norm in ((found, torch.bfloat16, rms_norm), (wanted, torch.float32, _by_operators)):
            leaves = [leaf.to(torch.bfloat16).to(dtype).requires_grad_() for leaf in (values, scales)]
            out = norm(leaves[0], leaves[1], 1e-6)
            results += [out.detach().float(), *(g.float() for g in torch.autograd.grad(out, leaves, slopes.to(dtype)))]
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))

    return kernel_trial.passed("norms", difference)


def _by_operators(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@torch.no_grad()
def enable(model: nn.Module) -> int:
    """Have the RMS norms of `model` that compute weight · x / √(mean(x²) + eps) run by the kernels. Returns how many.

    Norms of another kind (a weight of 1 + w, a bias) give other values on a probe and stay as they are.
    """
    count = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or not isinstance(weight, torch.Tensor):
            continue
        if weight.dim() == 1 and _is_plain(module, weight, eps):
            module.forward = _Fused(module, eps)  # type: ignore[method-assign]
            count += 1
    return count


def _is_plain(module: nn.Module, weight: torch.Tensor, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(2, len(weight), generator=generator).to(weight)
    expected = _by_operators(probe.float(), weight.float(), eps)
    return torch.allclose(module(probe).float(), expected, rtol=2e-2, atol=2e-2)
