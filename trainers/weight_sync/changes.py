"""Only what changed since a server acknowledged an update (`weight_sync=sparse`), by file or by broadcast.

    staged buckets ─┬─ compare with those last acknowledged ─▶ patches ─▶ members that mirror them
                    └─ everything, kept there as mirror ────────────────▶ members that do not (new, or failed since)

A server patches its mirror, compares every patched bucket's checksum with the trainer's, and only then loads from it. Where
more changed than `MOST` of the bytes, everything is sent: a patch of everything would be larger than everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from trainers.weight_sync import sparse
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.layout import Layout
from trainers.weight_sync.members import Member
from trainers.weight_sync.shared_storage import WeightFiles
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.ways import Results

MOST = 0.5


class Changes:
    """Way `sparse`. `broadcast`: None: through files."""

    name: ClassVar[str] = "sparse"
    on_host: ClassVar[bool] = False
    every_rank: ClassVar[bool] = False

    def __init__(self, output_dir: str, broadcast: Broadcast | None = None) -> None:
        self.files = WeightFiles(output_dir)
        self.broadcast = broadcast
        self.acknowledged: torch.Tensor | None = None  # the buckets that some member mirrors
        self.acknowledged_as: tuple[str, str] | None = None  # layout, version
        self.bytes_sent = 0

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """See `Way.send`."""
        layout = staging.layout
        assert layout is not None, "nothing is staged"
        up_to_date = [m for m in members if m.mirrors is not None and (layout.id, m.mirrors) == self.acknowledged_as]
        if self.broadcast is not None and len(up_to_date) < len(members):
            up_to_date = []  # one broadcast is the same for everybody
        patches = self._patches(layout, staging.buckets) if up_to_date else None
        if patches is None:
            up_to_date = []
        behind = [member for member in members if member not in up_to_date]
        results: Results = {}
        if up_to_date and patches is not None:
            results |= self._send_patches(up_to_date, staging, patches, version)
        if behind:
            results |= self._send_everything(behind, staging, version)
        self._note(results, staging, version)
        return results

    def close(self) -> None:
        self.files.close()
        if self.broadcast is not None:
            self.broadcast.close()

    def _patches(self, layout: Layout, buckets: list[torch.Tensor]) -> dict[int, tuple[int, sparse.Patch]] | None:
        """Bucket → (word width, patch), unchanged ones left out; None where everything is shorter."""
        assert self.acknowledged is not None, "patches without anything acknowledged"
        before = self.acknowledged[: layout.nbytes].split(list(layout.buckets))
        widths = [
            2 if all(e.dtype.itemsize == 2 for e in layout.entries if e.bucket == index) else 4 for index in range(len(buckets))
        ]
        patches: dict[int, tuple[int, sparse.Patch]] = {}
        total = 0
        for index, (old, new, width) in enumerate(zip(before, buckets, widths, strict=True)):
            at = sparse.changed_words(old, new, width)
            if not at.numel():
                continue
            if at.numel() * 1.5 > MOST * layout.nbytes:  # what each takes at least
                return None
            patches[index] = width, sparse.encode(old, new, width, at)
            total += sum(patches[index][1].sizes)
            if total > MOST * layout.nbytes:
                return None
        return patches

    def _send_patches(
        self, members: Sequence[Member], staging: Staging, patches: dict[int, tuple[int, sparse.Patch]], version: int
    ) -> Results:
        assert staging.layout is not None and self.acknowledged_as is not None, "patches without a base"
        changes = {
            str(index): {
                "width": width,
                "relative": patch.relative,
                "low": patch.low,
                "sizes": patch.sizes,
                "checksum": sparse.checksum(staging.buckets[index]),
            }
            for index, (width, patch) in patches.items()
        }
        info: dict[str, Any] = {"layout": staging.layout.id, "sparse": changes, "base": self.acknowledged_as[1]}
        if self.broadcast is not None:
            parts = [_joined(patch) for _, patch in patches.values()]
            self.bytes_sent = sum(part.numel() for part in parts)
            info["timeout_s"] = self.broadcast.timeout_s
            return self.broadcast.send_parts(members, staging.layout, info, parts, version)
        tensors = {
            f"{index}.{name}": stream.cpu()
            for index, (_, patch) in patches.items()
            for name, stream in zip(sparse.STREAMS, patch.streams, strict=True)
        }
        results, self.bytes_sent = self.files.send(members, f"changes-{version}", tensors, info, version, staging.layout)
        return results

    def _send_everything(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        assert staging.layout is not None, "nothing is staged"
        info: dict[str, Any] = {"layout": staging.layout.id, "keep": [sparse.checksum(bucket) for bucket in staging.buckets]}
        if self.broadcast is not None:
            self.bytes_sent = staging.layout.nbytes
            info["timeout_s"] = self.broadcast.timeout_s
            return self.broadcast.send_parts(members, staging.layout, info, staging.buckets, version)
        host = [bucket.cpu() for bucket in staging.buckets]
        tensors = staging.layout.views(host)
        results, self.bytes_sent = self.files.send(members, f"policy-{version}", tensors, info, version, staging.layout)
        return results

    def _note(self, results: Results, staging: Staging, version: int) -> None:
        """What members that took the update mirror now, and what they mirror it of."""
        assert staging.layout is not None, "nothing is staged"
        took = [member for member, result in results.items() if isinstance(result, Seconds)]
        for member in took:
            member.mirrors = str(version)
        if took and self.acknowledged_as != (staging.layout.id, str(version)):
            if self.acknowledged is None or self.acknowledged.numel() < staging.layout.nbytes:
                self.acknowledged = torch.empty_like(staging.memory)
            self.acknowledged[: staging.layout.nbytes].copy_(staging.memory[: staging.layout.nbytes])
            self.acknowledged_as = staging.layout.id, str(version)


def _joined(patch: sparse.Patch) -> torch.Tensor:
    """A patch's streams as bytes, filled up to whole words of 32 bits."""
    parts = patch.streams
    length = sum(part.numel() for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(-length % 4)])
