"""Counts what one layer of a tiny Qwen3 keeps for its backward, in bfloat16, beside what the memory planner says it keeps.

Prints a JSON object: norms as the model has them, and by the kernels (`TRITON_INTERPRET=1` before triton is imported).
"""

from __future__ import annotations

import json
import sys

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from trainers import norm_kernels
from trainers.memory_plan import Levers, layer_token_bytes
from trainers.model_shape import shape_of

TOKENS = 64
FIELDS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
FIELDS |= {"num_key_value_heads": 2, "head_dim": 16}


def counted(fused: bool) -> int:
    """Bytes of all storages that the layer's graph holds, but for parameters, its input and the rotation's tables."""
    torch.manual_seed(0)
    config = Qwen3Config(**FIELDS)
    config._attn_implementation = "sdpa"
    layer = Qwen3DecoderLayer(config, 0).to(torch.bfloat16)
    if fused:
        assert norm_kernels.can_fuse(layer.input_layernorm.weight, layer.input_layernorm.weight), "TRITON_INTERPRET is not set"
        assert norm_kernels.enable(layer) == 4
    hidden = torch.randn(1, TOKENS, config.hidden_size, dtype=torch.bfloat16).requires_grad_()
    tables = Qwen3RotaryEmbedding(config)(hidden, torch.arange(TOKENS)[None])
    apart = {t.untyped_storage().data_ptr() for t in (hidden, *tables, *layer.parameters())}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(hidden, position_embeddings=tables)
    out = out[0] if isinstance(out, tuple) else out
    total = sum(seen.values())
    out.float().sum().backward()  # everything that was kept is still there up to here
    return total


def main() -> None:
    shape = shape_of({"model_type": "qwen3", **FIELDS}, "tiny")
    result = {}
    for fused in (False, True):
        said = TOKENS * layer_token_bytes(shape, Levers(own_kernels=fused), whole_mlp=True).kept
        result["fused" if fused else "own"] = [counted(fused), said]
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
