"""Counts the bytes of tensors that are still referred to, whoever holds them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators made and that something still refers to; those of `apart` are not counted."""

    def __init__(self, apart: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = 0
        self._bytes = {tensor.untyped_storage()._cdata: 0 for tensor in apart}

    def leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, 0)
        storage = tensor.untyped_storage()._cdata
        self.now -= self._bytes[storage]
        self._bytes[storage] = 0
        return tensor

    def _count(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes:
            self._bytes[storage._cdata] = size
            self.now += size
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, storage: int) -> None:
        self.now -= self._bytes.pop(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, tensor.untyped_storage().nbytes())
        return out
