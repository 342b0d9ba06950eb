"""Makes the model of `sft_books_cpu.yaml`: `python examples/sft_books_cpu.py FOLDER BOOKS`.

A Llama of 2 layers with random weights and a byte-pair vocabulary of the books' own, for sequences of up to 2,048 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

WINDOW, VOCABULARY = 2048, 2048


def make_model(
    folder: Path, books: Path, *, window: int = WINDOW, vocabulary: int = VOCABULARY, hidden: int = 64, layers: int = 2
) -> None:
    """`window`: positions it has; heads have 32 dimensions."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    files = sorted(str(file) for file in books.glob("*.txt"))
    if not files:
        raise SystemExit(f"{books} has no .txt files")
    made = ByteLevelBPETokenizer()
    made.train(files, vocab_size=vocabulary, special_tokens=["<eos>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=window,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    make_model(Path(sys.argv[1]), Path(sys.argv[2]))
