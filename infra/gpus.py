"""Which GPUs this machine has, and which of them this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NoDriver(Exception):
    """No driver of NVIDIA's answers."""


@contextmanager
def nvml() -> Iterator[tuple[Any, list[Any]]]:
    """NVIDIA's library, and a handle of each GPU by its index.

    Raises:
        ImportError: the library is not installed.
        NoDriver: there is no driver, or it does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriver(str(error)) from error
    try:
        yield pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[int]:
    """NVML indices of this machine's GPUs, narrowed by CUDA_VISIBLE_DEVICES; empty without GPU, driver or library."""
    try:
        with nvml() as (library, devices):
            names = [str(library.nvmlDeviceGetUUID(device)) for device in devices]
    except (ImportError, NoDriver):
        return []
    return narrow(names, os.environ.get("CUDA_VISIBLE_DEVICES"))


def memory_bytes(index: int) -> int:
    """All memory of the GPU of this NVML index. Raises as `nvml` does."""
    with nvml() as (library, devices):
        return int(library.nvmlDeviceGetMemoryInfo(devices[index]).total)


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
