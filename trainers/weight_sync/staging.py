"""The policy in buckets, before any server is paused: every way sends from here, and a second try needs no second gather.

    every rank: gather block ─▶ rank 0 (or every rank that shares memory): one fused copy per block into the buckets

No rank waits in a collective while rank 0 is in a call, because the gather is over before the first call.
"""

from __future__ import annotations

import torch
from torch import _foreach_copy_ as foreach_copy_  # type: ignore[attr-defined]

from trainers.model import Policy
from trainers.weight_sync.layout import ALIGN_BYTES, Layout, gathered_blocks

FREE_SHARE = 0.6  # of a GPU's free memory that buckets may take


class Staging:
    """One flat memory that holds the buckets of a layout one after the other; kept from sync to sync."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.layout: Layout | None = None

    def reserve(self, layout: Layout) -> None:
        """Memory for the layout; what was staged is gone when it has to grow."""
        self.layout = layout
        if self.memory.numel() < layout.nbytes:
            self.memory = torch.empty(0, dtype=torch.uint8)
            pinned = self.device.type == "cpu" and torch.cuda.is_available()
            self.memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self.device, pin_memory=pinned)

    @property
    def buckets(self) -> list[torch.Tensor]:
        assert self.layout is not None, "nothing is staged"
        return list(self.memory[: self.layout.nbytes].split(list(self.layout.buckets)))

    @torch.no_grad()
    def fill(self, policy: Policy, layout: Layout, dtype: torch.dtype, keep: bool) -> None:
        """Gather and pack; called on every rank, `keep` where the buckets are wanted."""
        if keep:
            self.reserve(layout)
        views = layout.views(self.buckets) if keep else {}
        for block in gathered_blocks(policy.model, layout, dtype, keep):
            if block:
                foreach_copy_([views[name] for name in block], list(block.values()), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def staging_device(device: torch.device, layout: Layout) -> torch.device:
    """The trainer's device if the buckets fit beside what is there already, else the host."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if layout.nbytes + ALIGN_BYTES < FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + cached):
            return device
    return torch.device("cpu")
