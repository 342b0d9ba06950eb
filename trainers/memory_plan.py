"""What one optimizer step holds at its peak, in bytes of one GPU, from a model's shape and the levers. Imports no torch.

A step passes through five moments; the peak is the largest of them:

    head       every layer's checkpoint · a chunk of logits · the head's gradient          no gradients of layers yet
    mlp        ┐ one layer computed again and differentiated: what it keeps, and what its
    norm       ├ operators have in hand. Without offload the last layer's is the largest (every checkpoint is still
    attention  ┘ there), with offload a first one's (every gradient is there)
    root       every gradient · embedding and head whole, their gradients, and those in float32 on their way
    optimizer  weights, gradients, moments, and one temporary as large as a moment

Symbols, in elements: T tokens of a rank, H hidden, I intermediate, Q all queries' width (attention's output has it too), K all
keys' width, V vocabulary, P parameters, N GPUs the parameters are sharded over. `e` is 2 bytes, bfloat16, in which forward and
backward compute; `m` the bytes of a master weight (4 or 2), of its gradient, and of each of Adam's two moments.

- states: weight m · P / N, gradient m · P / N, moments 2m · P / N, the optimizer's temporary m · P / N.
- gathered: embedding, head and last norm from the first forward to the end of the backward, e each; two layers, e each.
- kept between forward and backward, a layer: its input [T, H] · e, and with `save_attention` attention's output [T, Q] · e and
  log-sum-exp [T, heads] · 4. With `offload` that of two layers is on the device, of all in host memory.
- a layer that is computed again keeps, in [T, ·] · e: H into q, k and v; Q + K before their norms, where there are any; K the
  values; Q + K after the rotation; Q attention's output; H between attention and MLP; H into the MLP; and 4 I inside the MLP
  (gate, its activation, up, their product), or of one tile alone. A norm that is no kernel of ours keeps 4 + e bytes for every
  element instead: its input in float32 and the divided input.
- in hand: of the MLP's backward two more [T, I]; of attention's the gradients of q, k, v and output and cuDNN's float32 sum for
  the queries, 4 Q, and where query heads share keys, their gradients by query head before they are summed, 2 Q · e (so said by
  what was measured: with it four runs are met to 1%); of a norm that is no kernel of ours three float32 copies of its input.
- head: logits of `chunk_terms` tokens in e; its gradient in float32 where there are several chunks, and again in e.
- context parallel: keys and values of a neighbour twice, float32 sums of output and gradients; Ulysses: a second copy of q, k,
  v and output, by heads; keys and values are repeated until the ranks divide their heads.

What the allocator reports (`perf/peak_memory_bytes`) is `Peak.bytes`. A GPU needs more: `required_bytes` adds the CUDA context,
communication buffers and what lies between blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainers.errors import ConfigError
from trainers.model_shape import ModelShape

GIB = 2**30
E = 2  # bytes of bfloat16
CHUNK_ELEMENTS = 1 << 26  # as in trainers.head, which imports torch
KEPT_SHARE = 48
CONTEXT_BYTES = int(0.75 * GIB)  # CUDA context and libraries' handles
GROUP_BYTES = int(1.25 * GIB)  # NCCL's buffers, with several ranks
BETWEEN_BLOCKS = 0.03  # of the peak, that the allocator cannot hand out


@dataclass(frozen=True, slots=True)
class Levers:
    """How a step is run. Names are those of the config."""

    offload: bool = False
    save_attention: bool = False
    mlp_tile_tokens: int | None = None
    cp_size: int = 1
    sp_size: int = 1
    bf16_masters: bool = False  # dtype=bfloat16
    lora_rank: int | None = None
    checkpointing: bool = True
    own_kernels: bool = True  # norms and rotation by `trainers.norm_kernels`, `rotation_kernels`; false: as the model has them

    @property
    def master_bytes(self) -> int:
        return 2 if self.bf16_masters else 4

    @property
    def names(self) -> str:
        """For a table."""
        whole = self.lora_rank is None
        said = [
            "offload" if self.offload else "",
            "save_attention" if self.save_attention else "",
            f"tiles of {self.mlp_tile_tokens}" if self.mlp_tile_tokens else "",
            f"cp {self.cp_size}" if self.cp_size > 1 else "",
            f"sp {self.sp_size}" if self.sp_size > 1 else "",
            "" if whole else f"LoRA {self.lora_rank}",
            "bf16 weights" if self.bf16_masters else "",
        ]
        return ", ".join(filter(None, said)) or "checkpointing alone"


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of one GPU, and of the machine that has all of them."""

    moments: dict[str, int]  # allocated at each moment of a step
    states_bytes: int  # weights, gradients and optimizer
    host_bytes: int

    @property
    def bytes(self) -> int:
        return max(self.moments.values())

    @property
    def moment(self) -> str:
        return max(self.moments, key=lambda name: self.moments[name])


def required_bytes(peak: Peak, gpus: int) -> int:
    """GPU memory to have for a peak: context, communication, and blocks that do not fit together."""
    return int(peak.bytes * (1 + BETWEEN_BLOCKS)) + CONTEXT_BYTES + (GROUP_BYTES if gpus > 1 else 0)


def rank_tokens(tokens: int, levers: Levers) -> int:
    """Of a sequence, what one rank has."""
    return -(-tokens // (levers.cp_size * levers.sp_size))


def check(shape: ModelShape, levers: Levers, tokens: int, gpus: int) -> None:
    """Refuse what no run could be.

    Raises:
        ConfigError: with the numbers that do not fit together.
    """
    ranks = levers.cp_size * levers.sp_size
    if gpus % ranks:
        raise ConfigError(
            f"cp_size {levers.cp_size} × sp_size {levers.sp_size} is {ranks} ranks, and {gpus} GPUs do not divide"
        )
    if shape.heads % levers.sp_size:
        raise ConfigError(f"sp_size {levers.sp_size} does not divide {shape.heads} attention heads: use cp_size, or a divisor")
    if levers.cp_size > 1 and shape.window is not None and tokens > shape.window:
        raise ConfigError(
            f"the model has layers with a sliding window of {shape.window} tokens, which context parallel cannot run: use "
            "sp_size in place of cp_size"
        )


def chunk_terms(shape: ModelShape, gpu_bytes: int) -> int:
    """Tokens whose logits the head holds at a time."""
    return max(16, max(CHUNK_ELEMENTS, gpu_bytes // KEPT_SHARE // E) // shape.vocabulary)


def kept_token_bytes(shape: ModelShape, levers: Levers) -> int:
    """Of one token and layer, what stays between forward and backward."""
    saved = E * shape.query + 4 * shape.heads if levers.save_attention else 0
    return E * shape.hidden + saved


def host_bytes(shape: ModelShape, levers: Levers, tokens: int, gpus: int) -> int:
    """Host memory that all ranks' checkpoints take."""
    if not levers.offload:
        return 0
    return gpus * shape.layers * rank_tokens(tokens, levers) * kept_token_bytes(shape, levers)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Of one token of a layer that is computed again: `kept` for its backward, and the most at each of its moments."""

    kept: int
    mlp: int
    norm: int
    attention: int


def layer_token_bytes(shape: ModelShape, levers: Levers, *, whole_mlp: bool) -> LayerBytes:
    """What the module says of a layer. Attention's output is left out where it is kept anyway.

    Args:
        whole_mlp: the MLP's wide tensors exist for all tokens.
    """
    hidden, wide, query, key = shape.hidden, shape.intermediate, shape.query, shape.key
    output = 0 if levers.save_attention else E * query + 4 * shape.heads
    normed = (query + key) if shape.qk_norms else 0
    values = E * (query + 2 * key)  # q and k after the rotation, v
    fused = levers.own_kernels and shape.plain_norms
    if fused:
        # What a norm keeps is its input and 4 bytes a row; the layer's own input is its checkpoint.
        before, between = E * hidden + E * normed, E * hidden
        rows = 8 + (4 * (shape.heads + shape.kv_heads) if normed else 0)
    else:
        before, between = (4 + E) * hidden + E * hidden + (4 + E) * normed, (4 + E) * hidden
        rows = 0
    into_mlp = E * hidden
    inside = 4 * E * wide if whole_mlp else 0
    kept = before + values + output + between + into_mlp + inside + rows
    attended = before + values + output + rows  # what is left of it when the MLP's part is done
    second_copy = E * (2 * query + 2 * _repeated(shape, levers)) if levers.sp_size > 1 else 0
    ring = E * 4 * key + 8 * query + 8 * key if levers.cp_size > 1 else 0
    temporaries = 0 if fused else 12
    mlp = kept + E * hidden + (2 * E * wide if whole_mlp else E * hidden)
    norm = attended + between + into_mlp + 2 * E * hidden + temporaries * hidden
    if normed and temporaries:
        norm = max(norm, before + rows + output + E * hidden + E * (query + 2 * key) + temporaries * query)
    by_heads = 2 * E * query if shape.kv_heads < shape.heads else 0
    gradients = E * hidden + E * query + E * (query + 2 * key) + 4 * query + by_heads
    return LayerBytes(kept + second_copy, mlp + second_copy, norm + second_copy, attended + gradients + second_copy + ring)


def _repeated(shape: ModelShape, levers: Levers) -> int:
    """Width of all keys once they are repeated until the ranks divide them."""
    return shape.head_dim * math.lcm(shape.kv_heads, levers.sp_size)


def peak(shape: ModelShape, levers: Levers, tokens: int, gpus: int, gpu_bytes: int, *, held_bytes: int = 0) -> Peak:
    """The memory of one step on a row of `tokens` tokens, all of them trained.

    Args:
        gpu_bytes: of one GPU; the head's chunk depends on it.
        held_bytes: taken by something else all the time.

    Raises:
        ConfigError: see `check`.
    """
    check(shape, levers, tokens, gpus)
    own = rank_tokens(tokens, levers)
    trained = _trained(shape, levers)
    base = 0 if levers.lora_rank is None else levers.master_bytes * shape.parameters
    width = 4 if levers.lora_rank is not None else levers.master_bytes  # an adapter is float32
    # Weights and moments are there all the time; a layer's gradient from its backward on.
    always = held_bytes + (base + 3 * width * trained.all) // gpus
    layers_gradients = width * trained.layers // gpus
    root_gradient = width * trained.root // gpus
    root = E * (shape.embedding_parameters + shape.hidden)
    head = E * shape.vocabulary * shape.hidden if trained.root else 0

    kept = own * kept_token_bytes(shape, levers)
    one_layer = trained.layers // shape.layers
    working = 2 * E * shape.layer_parameters + (E + 4) * one_layer  # gathered twice; its gradient, and that in float32
    every_checkpoint = 2 * kept if levers.offload else shape.layers * kept
    tile = levers.mlp_tile_tokens
    tiled = tile is not None and tile < own
    layer = layer_token_bytes(shape, levers, whole_mlp=not tiled)
    if not levers.checkpointing:
        every_checkpoint = shape.layers * own * layer_token_bytes(shape, levers, whole_mlp=True).kept
    one_tile = 0
    if tiled and tile is not None:
        one_tile = tile * E * (6 * shape.intermediate + 2 * shape.hidden)
        one_tile += (4 + E) * (shape.mlp_parameters if levers.lora_rank is None else 0)
    # With offload two layers' checkpoints are here at any time, so that the last backward, beside all gradients, needs most.
    gradients_then = layers_gradients if levers.offload or _late(shape, levers, kept, layers_gradients) else 0
    checkpoints_then = every_checkpoint if levers.offload or not gradients_then else kept
    then = always + root + head + gradients_then + checkpoints_then + working
    terms = min(chunk_terms(shape, gpu_bytes), own)
    several = terms < own
    head_sum = ((4 if several else 0) + E) * shape.vocabulary * shape.hidden if trained.root else 0
    final = own * (E * shape.hidden * 6 + 40)
    moments = {
        "head": always + root + head_sum + every_checkpoint + terms * shape.vocabulary * E + final,
        "mlp": then + own * layer.mlp + one_tile,
        "norm": then + own * layer.norm,
        "attention": then + own * layer.attention,
        "root": always + layers_gradients + root + 2 * head + (4 + width // gpus) * trained.root + own * E * shape.hidden,
        "optimizer": always + layers_gradients + root_gradient + width * trained.all // gpus,
    }
    states = always - held_bytes + layers_gradients + root_gradient
    return Peak(moments, states, host_bytes(shape, levers, tokens, gpus))


def _late(shape: ModelShape, levers: Levers, kept: int, layers_gradients: int) -> bool:
    """Whether the first layer's backward, the last to come, needs more than the last layer's: gradients grow faster than
    checkpoints go."""
    return layers_gradients > (shape.layers - 1) * kept


@dataclass(frozen=True, slots=True)
class _Trained:
    """Parameters that have gradients and moments."""

    layers: int
    root: int

    @property
    def all(self) -> int:
        return self.layers + self.root


def _trained(shape: ModelShape, levers: Levers) -> _Trained:
    if levers.lora_rank is not None:
        return _Trained(shape.adapter_parameters(levers.lora_rank), 0)
    return _Trained(shape.layers * shape.layer_parameters, shape.embedding_parameters + shape.hidden)
