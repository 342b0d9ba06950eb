"""Runs the head's Triton kernels on a CPU (`TRITON_INTERPRET=1` before triton is imported) beside the torch path."""

from __future__ import annotations

import sys

import torch

from trainers import head

TERMS, HIDDEN, VOCABULARY, TOP = 13, 16, 300, 5


def run(fused: bool, bias: bool, softcap: float | None, temperature: float, chunk: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = (2 * torch.randn(TERMS, HIDDEN, generator=generator)).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    targets = torch.randint(VOCABULARY, (TERMS,), generator=generator)
    top_ids = torch.randint(-1, VOCABULARY, (TERMS, TOP), generator=generator)
    top_ids[0] = targets[0]  # the target again, and again
    top_ids[1] = -1
    chooses = head.can_fuse
    head.can_fuse = lambda hidden: fused and chooses(hidden)
    try:
        outputs = head.token_logprobs(
            hidden, weight, targets, bias=offset, temperature=temperature, softcap=softcap, top_ids=top_ids, chunk=chunk
        )
    finally:
        head.can_fuse = chooses
    scale = torch.randn(TERMS, 1 + TOP, generator=generator)
    loss = (outputs.logprobs * scale[:, 0]).sum() + (torch.where(top_ids < 0, 0.0, outputs.top_logprobs) * scale[:, 1:]).sum()
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    return [*outputs, *first, *again]


def main() -> None:
    assert head.can_fuse(torch.zeros(1)), "TRITON_INTERPRET is not set"
    for bias, softcap, temperature in ((False, None, 1.0), (True, 5.0, 0.7), (True, None, 1.3)):
        for chunk in (4, 100):
            ours, theirs = run(True, bias, softcap, temperature, chunk), run(False, bias, softcap, temperature, chunk)
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda text, i=index: f"output {i}: {text}")
    print("equal")


if __name__ == "__main__":
    sys.exit(main())
