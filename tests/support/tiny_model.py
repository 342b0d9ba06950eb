"""A character-level Llama small enough that a real vLLM CPU server runs it in tests.

Vocabulary 64: six special tokens, then digits, lower-case letters and a few signs. Weights are drawn from the seed alone, so
two builds with the same arguments are equal byte for byte, and two seeds give different greedy text.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.letters import letter_tokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=?.,:()<>'!#\n%"
VOCABULARY = (*SPECIAL, *CHARACTERS)
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' }}"
    "{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ '<user>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer():
    """A `PreTrainedTokenizerFast` with one token per character; unknown characters become `<unk>`."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    assert len(vocabulary) == 61, f"{len(vocabulary)} distinct tokens, expected 61"
    vocabulary |= {f"<unused{index}>": index for index in range(len(vocabulary), 64)}
    special = ["<user>", "<assistant>"]
    return letter_tokenizer(vocabulary, CHAT_TEMPLATE, special, bos_token="<bos>", eos_token="<eos>", model_max_length=512)


def build_model(seed: int = 0, tied: bool = True, layers: int = 2, hidden: int = 64):
    """A `LlamaForCausalLM` in float32; head size 32, because vLLM's CPU attention has no kernel for smaller ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(hidden // 64, 1),
        max_position_embeddings=512,
        # Wide enough that greedy text is not one repeated token.
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=VOCABULARY.index("<bos>"),
        eos_token_id=VOCABULARY.index("<eos>"),
        pad_token_id=VOCABULARY.index("<pad>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def build_tiny_model(
    directory: str | os.PathLike[str], seed: int = 0, tied: bool = True, layers: int = 2, hidden: int = 64
) -> Path:
    """Write model, tokenizer and chat template into `directory` (made if needed) and return it."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    build_model(seed, tied, layers, hidden).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path
