"""Tensors to a safetensors file, from where they lie: safetensors' own writer first copies each of them into a `bytes`.

8 bytes: length of the header │ header, JSON, padded to 8 │ tensors, those of the widest type first, so that each is aligned
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write host tensors under their names. One that is not contiguous is copied.

    Raises:
        OSError: the file could not be written; a part of it may be there.
        KeyError: a type that is none of `DTYPES`.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
