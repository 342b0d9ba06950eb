"""Seconds of one optimizer step, from a model's shape and the levers, by rates that were measured. Imports no torch.

    seconds = attention + matrix products + head + what memory bandwidth bounds + what no computation hides of copies

For T tokens of a rank, L layers; symbols as in `trainers.memory_plan`:

- attention: 2 · T² · Q FLOP a pass and layer (causal), 2.5 times that backward, at the rate the kernel reached at that length;
  forward, once more where it is computed again, backward. A rank of R that share a sequence has 1/R of it.
- matrix products: 2 FLOP a weight, token and pass: forward, recomputation, two backward (one where weights are frozen).
- head: four products of [T, H] and [H, V], but that the last chunk's logits are not computed again.
- bandwidth: bytes that norms, rotation, the MLP's activation and sums read and write, and those of the optimizer.
- copies: offload over PCIe in both directions, gathers and reductions of weights, a ring's keys and values, all beside the
  computation and counted where they take longer than it; Ulysses' all-to-all is waited for.

The rates are those of an H200. The first step of a run is not such a step: kernels are planned, host memory is pinned.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from trainers.memory_plan import E, Levers, chunk_terms, kept_token_bytes, rank_tokens
from trainers.model_shape import ModelShape

Kernel = Literal["cudnn", "flash"]

# TFLOP/s by length, 16 query and 8 key-value heads, head dim 128, bfloat16. `flash` is FlashAttention 4; 3 forward is as fast.
# cuDNN's backward at 262,144 is what whole steps of that length leave for it; FlashAttention's was not timed beyond 65,536.
FORWARD: dict[Kernel, dict[int, float]] = {
    "cudnn": {16384: 627.0, 65536: 594.0, 262144: 504.0},
    "flash": {16384: 676.0, 65536: 653.0, 262144: 633.0},
}
BACKWARD: dict[Kernel, dict[int, float]] = {
    "cudnn": {16384: 534.0, 65536: 536.0, 262144: 550.0},
    "flash": {16384: 590.0, 65536: 609.0},
}
PRODUCTS = 600e12  # FLOP/s of a model's matrix products, in whole steps
BANDWIDTH = 2.7e12  # bytes/s of what is between them, in whole steps
PCIE = 50e9  # bytes/s of pinned copies, each way
LINKS = 300e9  # bytes/s of a GPU to the others of its host


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step's parts."""

    attention_s: float
    products_s: float
    head_s: float
    bandwidth_s: float
    copies_s: float

    @property
    def seconds(self) -> float:
        return self.attention_s + self.products_s + self.head_s + self.bandwidth_s + self.copies_s


def rate(table: dict[int, float], tokens: int) -> float:
    """FLOP/s at a length: between two measured ones by the logarithm of the length, beyond them that of the nearest."""
    lengths = sorted(table)
    tokens = min(max(tokens, lengths[0]), lengths[-1])
    for low, high in itertools.pairwise(lengths):
        if tokens <= high:
            share = math.log(tokens / low) / math.log(high / low)
            return 1e12 * (table[low] + share * (table[high] - table[low]))
    return 1e12 * table[lengths[-1]]


def step_time(shape: ModelShape, levers: Levers, tokens: int, gpus: int, gpu_bytes: int, kernel: Kernel = "cudnn") -> StepTime:
    """Of a row of `tokens` tokens, all of them trained, on each group of cp_size × sp_size GPUs."""
    own, frozen = rank_tokens(tokens, levers), levers.lora_rank is not None
    again = 1 if levers.checkpointing else 0
    forward_s, backward_s = _attention(shape, levers, tokens, kernel)
    attention_s = forward_s * (1 if levers.save_attention else 1 + again) + backward_s
    weights = shape.layers * shape.layer_parameters
    products = 2.0 * weights * own * (2 + again if frozen else 3 + again)
    if frozen and levers.lora_rank is not None:
        products += 2.0 * shape.adapter_parameters(levers.lora_rank) * own * (3 + again)
    chunks = -(-own // chunk_terms(shape, gpu_bytes))
    head = 2.0 * own * shape.vocabulary * shape.hidden * (1 + (1 - 1 / chunks) + (1 if frozen else 2))
    moved = own * shape.layers * _moved_token_bytes(shape, levers) + _optimizer_bytes(shape, levers) / gpus
    parts = attention_s, products / PRODUCTS, head / PRODUCTS, moved / BANDWIDTH
    return StepTime(*parts, _copies(shape, levers, own, gpus, forward_s, sum(parts)))


def _attention(shape: ModelShape, levers: Levers, tokens: int, kernel: Kernel) -> tuple[float, float]:
    """Seconds of all layers' forward and backward on one rank. A ring's kernels see pieces, Ulysses' the whole length."""
    flops = 2.0 * tokens**2 * shape.query * shape.layers / (levers.cp_size * levers.sp_size)
    length = tokens // levers.cp_size
    return flops / rate(FORWARD[kernel], length), 2.5 * flops / rate(BACKWARD[kernel], length)


def _moved_token_bytes(shape: ModelShape, levers: Levers) -> float:
    """Bytes read and written of one token and layer between matrix products, forward, recomputation and backward."""
    normed = 2 * shape.hidden + (shape.query + shape.key if shape.qk_norms else 0)
    norms = (14 if levers.own_kernels else 152) * normed
    rotation = (12 if levers.own_kernels else 60) * (shape.query + shape.key)
    mlp = 38 * shape.intermediate + (12 * shape.hidden if levers.mlp_tile_tokens else 0)
    sums = 42 * shape.hidden
    ring = levers.cp_size * (24 * shape.query + 24 * shape.key) if levers.cp_size > 1 else 0
    return norms + rotation + mlp + sums + ring


def _optimizer_bytes(shape: ModelShape, levers: Levers) -> float:
    """Of all GPUs: weights cast and gathered twice, gradients reduced, clipped and applied."""
    if levers.lora_rank is not None:
        return 12.0 * shape.parameters + 60.0 * shape.adapter_parameters(levers.lora_rank)
    return (12 + 12 * levers.master_bytes) * float(shape.parameters)


def _copies(shape: ModelShape, levers: Levers, own: int, gpus: int, forward_s: float, computed_s: float) -> float:
    """Seconds of copies that nothing hides."""
    exposed = 0.0
    if levers.offload:
        one_way = shape.layers * own * kept_token_bytes(shape, levers) / PCIE
        # Out during the forward, about a quarter of the work; back during the rest.
        first = forward_s + (computed_s - forward_s) / 4
        exposed += max(0.0, one_way - first) + max(0.0, one_way - (computed_s - first))
    if gpus > 1:
        trained = 4.0 * (shape.parameters if levers.lora_rank is None else shape.adapter_parameters(levers.lora_rank))
        weights = (2 * E * shape.parameters + trained) * (gpus - 1) / gpus / LINKS
        exposed += max(0.0, weights - computed_s)
    passes = 3 if levers.save_attention or not levers.checkpointing else 4
    if levers.sp_size > 1:
        exposed += passes * shape.layers * own * E * (2 * shape.query + 2 * shape.key) / LINKS
    if levers.cp_size > 1:
        around = (levers.cp_size - 1) * own * shape.layers * 2 * shape.key * (E * passes + 4) / LINKS
        exposed += max(0.0, around - forward_s)
    return exposed
