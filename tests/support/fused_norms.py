"""Runs the norms' Triton kernels on a CPU (`TRITON_INTERPRET=1` before triton is imported) beside a model's own norm."""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trainers import norm_kernels

# Widths that are powers of two and not; one row; more blocks of rows than there are programs.
SHAPES = ((3, 40), (1, 7, 128), (5, 6, 16), (1, 1, 1100), (0, 32), (9, 300))


def both(module: Qwen3RMSNorm, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of input and weight, by the kernels and by the module's own operators in float32."""
    generator = torch.Generator().manual_seed(len(shape))
    x, scale = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = module.weight.detach().to(dtype)

    def run(norm, exact: bool) -> list[torch.Tensor]:
        leaves = [(t.float() if exact else t.clone()).requires_grad_() for t in (x, weight)]
        y = norm(*leaves)
        return [y.detach(), *torch.autograd.grad((y.float() * scale.float()).sum(), leaves)]

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return run(lambda x, weight: norm_kernels.rms_norm(x, weight, module.variance_epsilon), False), run(own, True)


def main() -> None:
    norm_kernels.PROGRAMS = 2
    for shape in SHAPES:
        module = Qwen3RMSNorm(shape[-1], eps=1e-5)
        torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for ours, theirs in zip(*both(module, shape, dtype), strict=True):
                assert ours.dtype == dtype, ours.dtype
                torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)
        assert norm_kernels.can_fuse(module.weight, module.weight), "TRITON_INTERPRET is not set"
        own = module(torch.ones(shape))
        assert norm_kernels.enable(module) == 1
        torch.testing.assert_close(module(torch.ones(shape)), own)
    assert norm_kernels.works(torch.device("cpu"))
    print("equal")


if __name__ == "__main__":
    sys.exit(main())
