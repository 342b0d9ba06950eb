"""Vision-language models of Qwen's shapes, small enough for tests; random weights, drawn from the seed alone."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
SPECIAL: dict[str, Any] = {"image_token_id": 61, "video_token_id": 62, "vision_start_token_id": 59, "vision_end_token_id": 60}


def build_vision_model(kind: str = "qwen3_vl", seed: int = 0, tied: bool = False) -> Any:
    """`kind`: qwen3_vl (interleaved multi-axis positions, norms on queries and keys) or qwen2_5_vl (sections, biases)."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    if kind == "qwen3_vl":
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
        text = {**TEXT, "head_dim": 32, "rope_parameters": {**rope, "mrope_interleaved": True}}
        config: Any = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **SPECIAL)
        model_class: Any = Qwen3VLForConditionalGeneration
    else:
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        }
        text = {**TEXT, "rope_parameters": rope}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **SPECIAL)
        model_class = Qwen2_5_VLForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()
