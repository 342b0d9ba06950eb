"""Adapters reach the GPU by one copy of their file, where vLLM pins and copies every matrix of it alone.

    adapter_model.safetensors ─▶ a pinned buffer, kept ─▶ a buffer on the GPU ─▶ views of it, in place of vLLM's host tensors

vLLM keeps what it loads on the host, page-locked tensor by tensor, and copies from there into a slot of the stacked weights.
What is here changes where the matrices lie and nothing else. They lie on the GPU where there is room for them; if not, and for
every other kind of file, vLLM's own way is taken.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FILE = "adapter_model.safetensors"
SHARE = 0.02  # of free GPU memory that an adapter may take: a server keeps several
READERS = 4  # threads: one alone does not copy from the page cache as fast as memory is
PART = 1 << 20  # bytes below which another thread does not pay


class Staging:
    """Page-locked host memory that files are read into, the same for one after the other."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.sent: torch.cuda.Event | None = None

    def of(self, size: int) -> torch.Tensor:
        """uint8 [size], when what was in it has left."""
        if self.sent is not None:
            self.sent.synchronize()
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self.memory[:size]

    def send(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        data = host.to(device, non_blocking=True)
        self.sent = torch.cuda.Event()
        self.sent.record()
        return data


staging = Staging()


def read(file: int, into: memoryview, begin: int) -> int:
    """Fill `into` from byte `begin` of an open file, by several threads; bytes read."""
    step = max(PART, -(-len(into) // READERS))

    def part(start: int) -> int:
        stop, at = min(start + step, len(into)), start
        while at < stop and (count := os.preadv(file, [into[at:stop]], begin + at)):
            at += count
        return at - start

    with ThreadPoolExecutor(READERS) as readers:
        return sum(readers.map(part, range(0, len(into), step)))


class WholeFile:
    """A safetensors file on a device, with the methods of `safe_open` that a load uses. ValueError: another kind of file."""

    def __init__(self, path: str, device: torch.device) -> None:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(begin - 8)) if begin <= size else {}
            header.pop("__metadata__", None)
            for name, place in header.items():
                if place["dtype"] not in DTYPES or place["data_offsets"][0] % DTYPES[place["dtype"]].itemsize:
                    raise ValueError(f"{name} is {place['dtype']} at {place['data_offsets'][0]}")
            if not header or max(place["data_offsets"][1] for place in header.values()) != size - begin:
                raise ValueError(f"{size} bytes are not what its header says")
            on_gpu = device.type == "cuda"
            host = staging.of(size - begin) if on_gpu else torch.empty(size - begin, dtype=torch.uint8)
            if read(file.fileno(), memoryview(host.numpy()), begin) != size - begin:
                raise ValueError("it became shorter")
        self.data = staging.send(host, device) if on_gpu else host
        self.places = header

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self.places)

    def get_tensor(self, name: str) -> torch.Tensor:
        place = self.places[name]
        start, stop = place["data_offsets"]
        return self.data[start:stop].view(DTYPES[place["dtype"]]).view(place["shape"])


class Opener:
    """In place of the module `safetensors` while one adapter is loaded."""

    def __init__(self, whole: WholeFile) -> None:
        self.whole = whole

    def safe_open(self, path: str, framework: str) -> WholeFile:
        return self.whole


def whole_file(folder: str) -> WholeFile | None:
    """On the GPU; None where it goes vLLM's way."""
    path = os.path.join(folder, FILE)
    if not torch.cuda.is_available() or not os.path.isfile(path):
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    if os.path.getsize(path) > SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    try:
        return WholeFile(path, device)
    except (OSError, ValueError, KeyError) as error:
        logging.getLogger("vllm.loopwright").warning("%s is loaded matrix by matrix: %s", path, error)
        return None


def wrap(model: Any, module: Any) -> None:
    """`model`: vLLM's class of a loaded adapter; `module`: where it is defined, which reads files by `safetensors`."""
    from_local_checkpoint, reader = model.from_local_checkpoint.__func__, module.safetensors

    @functools.wraps(from_local_checkpoint)
    def load(cls: Any, lora_dir: str, *args: Any, **kwargs: Any) -> Any:
        stock = kwargs.get("device") != "cpu" or kwargs.get("tensorizer_config_dict")
        whole = None if stock else whole_file(lora_dir)
        if whole is None:
            return from_local_checkpoint(cls, lora_dir, *args, **kwargs)
        module.safetensors = Opener(whole)
        try:
            return from_local_checkpoint(cls, lora_dir, *args, **kwargs | {"device": str(whole.data.device)})
        finally:
            module.safetensors = reader

    load.whole = True
    model.from_local_checkpoint = classmethod(load)


def install() -> None:
    """Into this process's vLLM. One that loads adapters otherwise stays as it is, and says so."""
    try:
        from vllm.lora import lora_model

        if not hasattr(lora_model.LoRAModel.from_local_checkpoint, "whole"):
            wrap(lora_model.LoRAModel, lora_model)
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.loopwright").warning("adapters are loaded matrix by matrix: %s", error)
