"""Gradient checkpointing: what a layer keeps from its forward for its backward, and where.

    forward   layer i: input ─▶ Keeper ─▶ host memory (side stream)      attention's outputs ─▶ Keeper, if saved
    backward  layer i: Keeper ─▶ input ─▶ recompute (saved attention is not run again) ─▶ gradients
                        └─ meanwhile on the side stream: what layer i − 1 kept comes back

- plain: each layer's input stays on the device, everything inside is computed again (transformers' own checkpointing);
- `offload`: inputs go to pinned host memory while the next layer computes, and come back one layer ahead of their use;
- `save_attention`: the outputs of the attention operators are kept too (at long sequences they cost a layer most of its
  time), so that the backward runs attention's backward alone: 3.5 passes of attention's work a step where there were 4.5.

Invariants: what is kept is what the forward computed, bit by bit; a copy is read only after its event; a device tensor is given
back to the allocator only after the side stream is done with it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainers.errors import ConfigError

SMALLEST_BYTES = 1 << 20  # smaller tensors stay where they are; on a CPU, where only tests offload, nothing is too small


class Kept:
    """A tensor that a layer will want back: on its device, or in host memory."""

    __slots__ = ("arrived", "device", "host", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.device = tensor.device
        self.host: torch.Tensor | None = None
        self.arrived: Any = None  # the event of its copy back


class Keeper:
    """Keeps tensors in the order of the forward and gives them back in the order of the backward, the opposite.

    Args:
        offload: keep them in host memory. Without it they stay.
    """

    def __init__(self, offload: bool) -> None:
        self.offload = offload
        self._layers: list[list[Kept]] = []  # what each call of a layer has in host memory, oldest first; none is empty
        self._layer: list[Kept] = []  # of the call under way
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._stream: torch.cuda.Stream | None = None

    def begin_layer(self) -> None:
        """What is kept from now on belongs to the next layer."""
        self._layer = []

    def keep(self, tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        if self.offload and (tensor.device.type != "cuda" or tensor.nbytes >= SMALLEST_BYTES):
            self._send(kept)
        return kept

    def fetch(self, kept: Kept) -> torch.Tensor:
        """The tensor. What else its layer kept, and what the one before kept, starts on its way back."""
        if self._layers and kept in self._layers[-1]:
            for other in reversed(self._layers.pop()):
                self._bring(other)
            self._layer = []  # the last layer's would be held, on the device by now, until the next forward
            for other in self._layers[-1] if self._layers else ():
                self._bring(other)
        assert kept.tensor is not None, "layers are computed again in another order than the reverse of their forward"
        if kept.arrived is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.arrived)
        return kept.tensor

    def _send(self, kept: Kept) -> None:
        assert kept.tensor is not None
        tensor, kept.tensor = kept.tensor.detach(), None
        kept.host = self._buffer(tensor)
        self._copy(kept.host, tensor, tensor)
        if not self._layer:
            self._layers.append(self._layer)
        self._layer.append(kept)

    def _bring(self, kept: Kept) -> None:
        """Start the copy back, unless it is under way. The buffer is free for the next forward: its copies come after, on the
        same stream."""
        if kept.host is None:
            return
        kept.tensor = torch.empty_like(kept.host, device=kept.device)
        kept.arrived = self._copy(kept.tensor, kept.host, kept.tensor)
        self._free[kept.host.shape, kept.host.dtype].append(kept.host)
        kept.host = None

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free[tensor.shape, tensor.dtype]
        return free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, on_device: torch.Tensor) -> Any:
        """Copy on the side stream, after what the compute stream was given so far: that makes `on_device`, one of the two, or
        was the last to use its memory. Returns the copy's event; None: it is done."""
        if not on_device.is_cuda:
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(on_device.device)
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        on_device.record_stream(self._stream)
        return event


def _is_attention(function: Any) -> bool:
    """An operator that computes attention: torch's own and those that flash-attention packages register."""
    name = str(function.name()).lower() if hasattr(function, "name") else ""
    return ("attn" in name or "attention" in name) and "backward" not in name


class _Record(TorchDispatchMode):
    """Keeps what attention operators return."""

    def __init__(self, keeper: Keeper, saved: list[Any]) -> None:
        super().__init__()
        self.keeper, self.saved = keeper, saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_attention(func):
            self.saved.append(tree_map(lambda x: self.keeper.keep(x.detach()) if isinstance(x, torch.Tensor) else x, out))
        return out


class _Replay(TorchDispatchMode):
    """Gives back what they returned instead of running them.

    As aliases: autograd writes the recomputation's graph to the tensor it gets, and what is kept would hold all of that.
    """

    def __init__(self, keeper: Keeper, saved: list[Any]) -> None:
        super().__init__()
        self.keeper, self.saved, self.next = keeper, saved, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        if self.next == len(self.saved):
            raise ConfigError(f"save_attention: the recomputation runs {func} once more often than the forward did")
        self.next += 1
        return tree_map(lambda x: self.keeper.fetch(x).detach() if isinstance(x, Kept) else x, self.saved[self.next - 1])


def _contexts(keeper: Keeper) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """For one call of one layer: around its forward, and around its recomputation."""
    saved: list[Any] = []

    @contextlib.contextmanager
    def recompute() -> Iterator[None]:
        if not saved:
            raise ConfigError(
                "save_attention: the attention backend of this run is no single operator whose outputs could be saved (see the "
                "log line `attention backend`); set save_attention=false"
            )
        with _Replay(keeper, saved):
            yield

    return _Record(keeper, saved), recompute()


def enable(model: PreTrainedModel, *, kwargs: dict[str, Any] | None, save_attention: bool) -> Keeper | None:
    """Switch gradient checkpointing on. Returns what keeps tensors, where that is not the device alone.

    Args:
        kwargs: of the run's `gradient_checkpointing_kwargs`: `offload`, and arguments of `torch.utils.checkpoint.checkpoint`.
    """
    given = {"use_reentrant": False, **(kwargs or {})}
    offload = bool(given.pop("offload", False))
    if (offload or save_attention) and given["use_reentrant"]:
        raise ConfigError("gradient_checkpointing_kwargs: offload and save_attention need use_reentrant=false, the default")
    keeper = Keeper(offload) if offload or save_attention else None
    if keeper is not None and save_attention:
        given["context_fn"] = partial(_contexts, keeper)
    model.gradient_checkpointing_enable(given)
    model.enable_input_require_grads()
    if keeper is not None and offload:
        for module in model.modules():
            if getattr(module, "_gradient_checkpointing_func", None) is not None:
                setattr(module, "_gradient_checkpointing_func", partial(_kept_by, keeper, given))  # noqa: B010
    return keeper


def _kept_by(keeper: Keeper, given: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint`, its inputs kept by `keeper`. Parameters are no inputs: they are the module's."""
    keeper.begin_layer()
    with saved_tensors_hooks(keeper.keep, keeper.fetch):
        return checkpoint(function, *args, **given)


def check_host_memory(model: nn.Module, tokens: int, element_bytes: int, save_attention: bool, ranks_here: int) -> None:
    """Refuse `offload` where this machine's memory cannot take what its ranks would keep there.

    Raises:
        ConfigError: says how much is needed and how much there is.
    """
    needed = ranks_here * offloaded_bytes(model, tokens, element_bytes, save_attention)
    with open("/proc/meminfo") as file:
        free = 1024 * int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
    if needed > free:
        raise ConfigError(
            f"offload keeps {needed / 2**30:.1f} GiB in host memory for rows of {tokens} tokens on {ranks_here} ranks, and "
            f"{free / 2**30:.1f} GiB are available: shorten the rows (max_length, token_budget), set save_attention=false, or "
            "leave offload out of gradient_checkpointing_kwargs"
        )


def offloaded_bytes(model: nn.Module, tokens: int, element_bytes: int, save_attention: bool) -> int:
    """Host memory that `offload` takes for one row of `tokens`: a hidden state a layer, and attention's outputs where saved."""
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    width = config.hidden_size
    if save_attention:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        width += heads * (head_dim + 4 // element_bytes)  # the log-sum-exp is float32
    return config.num_hidden_layers * tokens * width * element_bytes
