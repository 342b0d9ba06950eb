"""Runs the rotation's Triton kernel on a CPU (`TRITON_INTERPRET=1` before triton is imported) beside a model's own function."""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3 import modeling_qwen3

from trainers import rotation_kernels

SHAPES = ((5, 4, 16), (1, 1, 6), (70, 3, 20))  # tokens, heads, width


def run(rotate, tokens: int, heads: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rotated queries and keys, and their gradients."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    cos, sin = draw(1, tokens, width), draw(1, tokens, width)
    leaves = [draw(1, tokens, count, width).requires_grad_() for count in (2 * heads, heads)]
    out = rotate(*(leaf.transpose(1, 2) for leaf in leaves), cos, sin)
    slopes = [draw(*x.shape) for x in out]
    return [*out, *torch.autograd.grad(out, leaves, slopes)]


def main() -> None:
    own = modeling_qwen3.apply_rotary_pos_emb
    layer = torch.nn.Module()
    layer.norm = modeling_qwen3.Qwen3RMSNorm(4)
    assert rotation_kernels.enable(layer) == 1 and rotation_kernels.enable(layer) == 0
    fused = modeling_qwen3.apply_rotary_pos_emb
    for shape in SHAPES:
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2)):  # the interpreter cuts bfloat16 off
            for ours, theirs in zip(run(fused, *shape, dtype), run(own, *shape, dtype), strict=True):
                assert ours.dtype == dtype
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        q = torch.randn(1, shape[1], shape[0], shape[2])
        assert rotation_kernels.can_fuse(q, q[:, 0], q[:, 0]), "TRITON_INTERPRET is not set"
        assert not rotation_kernels.can_fuse(q.double(), q[:, 0].double(), q[:, 0].double())
        assert not rotation_kernels.can_fuse(q, q[:, 0, :, :2], q[:, 0, :, :2]), "a part of a head is rotated otherwise"
    assert rotation_kernels.works(torch.device("cpu"))
    print("equal")


if __name__ == "__main__":
    sys.exit(main())
