"""Timing, model FLOPs, device peaks, and the line that says which side limits a step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from trainers.text_part import outside_text
from trainers.types import StepTotals

# Dense bfloat16 peak of one device in TFLOP/s, from the vendors' data sheets. First match in the device's name wins.
PEAK_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("B300", 2250.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("MI355X", 2516.6),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device for bfloat16 compute; None for another type or an unknown device."""
    if dtype != torch.bfloat16:
        return None
    return next((tflops * 1e12 for name, tflops in PEAK_BF16_TFLOPS if name in device_name), None)


class FlopCounter:
    """Forward + backward FLOPs of packed rows: 6 per weight and token (4 where it is frozen), head at trained positions, causal
    attention once."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        apart = {id(head), id(model.get_input_embeddings().weight)}
        unused = outside_text(model)
        named = [(name, p) for name, p in model.named_parameters() if id(p) not in apart and name not in unused]
        self.body = sum(p.numel() * (6 if p.requires_grad else 4) for _, p in named)
        self.head = (6 if head.requires_grad else 4) * config.vocab_size * config.hidden_size
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention = 6 * config.num_hidden_layers * config.num_attention_heads * width

    def step(self, totals: StepTotals) -> float:
        forwarded, trained = float(self.body) * totals.forwarded_tokens, float(self.head) * totals.tokens
        return forwarded + trained + float(self.attention) * totals.squared_tokens


class StepTimer:
    """Seconds per part of a step: CUDA events on a GPU (read after the step's one synchronisation), the host clock on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._host: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def device(self, name: str) -> Iterator[None]:
        """Time work queued on the device."""
        if not self.cuda:
            with self.host(name):
                yield
            return
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        stop.record()
        self._events.append((name, start, stop))

    @contextlib.contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Time what the host waits for."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._host[name] += time.perf_counter() - began

    def drain(self) -> dict[str, float]:
        """Seconds since the last drain; the device must have finished the timed work."""
        seconds, self._host = dict(self._host), defaultdict(float)
        for name, start, stop in self._events:
            seconds[name] = seconds.get(name, 0.0) + start.elapsed_time(stop) / 1e3
        self._events.clear()
        return seconds


def bottleneck(step_s: float, wait_s: float, backpressure_s: float) -> str:
    """Which side limits, with the option to turn. Both times are compared with the step's wall clock."""
    waited, held_back = wait_s > 0.2 * step_s, backpressure_s > 0.2 * step_s
    if waited and held_back:
        return (
            f"serial: the trainer waited {wait_s:.2f} s of {step_s:.2f} s for rollouts, while no more of them might start "
            "before its next sync; raise max_staleness"
        )
    if waited:
        return (
            f"generation-bound: the trainer waited {wait_s:.2f} s of {step_s:.2f} s for rollouts; "
            "raise max_concurrent_rollouts or max_staleness, or add student servers"
        )
    if held_back:
        return (
            f"trainer-bound: generation was held back {backpressure_s:.2f} s of {step_s:.2f} s; "
            "add trainer ranks, or lower gradient_checkpointing's cost"
        )
    return f"balanced: waited {wait_s:.2f} s, held back {backpressure_s:.2f} s of {step_s:.2f} s"
