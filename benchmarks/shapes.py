"""The models the benchmarks run on: Qwen3 with random weights, in the shapes of its published sizes and a tiny one."""

from __future__ import annotations

from transformers import Qwen3Config

from trainers.model_shape import ModelShape

# Layers, hidden, intermediate, query heads, key-value heads, head dim, vocabulary.
SHAPES: dict[str, tuple[int, ...]] = {
    "tiny": (2, 64, 128, 2, 1, 32, 128),
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
    "4b": (36, 2560, 9728, 32, 8, 128, 151936),
}


def model_shape(shape: tuple[int, ...]) -> ModelShape:
    """As the memory planner takes it."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary = shape
    return ModelShape(layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, tied=True, qk_norms=True)


def qwen3_config(shape: tuple[int, ...], positions: int) -> Qwen3Config:
    """`positions`: the longest sequence. The last two ids of the vocabulary begin and end a text."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary = shape
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
