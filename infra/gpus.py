"""Which GPUs this process may use."""

from __future__ import annotations

import os
from contextlib import suppress


def visible_gpus() -> list[int]:
    """NVML indices of this machine's GPUs, narrowed by CUDA_VISIBLE_DEVICES; empty without GPU, driver or library."""
    with suppress(ImportError):
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return []
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
        return narrow(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return []


def narrow(uuids: list[str], allowed: str | None) -> list[int]:
    """Indices of `uuids` that a CUDA_VISIBLE_DEVICES value (indices or UUID prefixes; None: all) lets through, in its order."""
    if allowed is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in filter(None, (part.strip() for part in allowed.split(","))):
        matches = [int(entry)] if entry.isdigit() else [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] >= len(uuids):
            break  # CUDA ignores everything from the first invalid entry on
        found.append(matches[0])
    return found
