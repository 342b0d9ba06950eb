"""Tokenizers of tests: one token per word or character of a small vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def letter_tokenizer(
    vocabulary: Mapping[str, int], template: str | None, special: Sequence[str], words: Sequence[str] = (), **fields: Any
) -> Any:
    """A `PreTrainedTokenizerFast`; what `vocabulary` does not have becomes `<unk>`.

    Args:
        template: of chats.
        special: tokens of `vocabulary` that are special beside those that `fields` names.
        words: tokens of more than one character that are found in text.
        fields: more arguments of the tokenizer: `eos_token`, `model_max_length`, …
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*words, r"[\s\S]"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
        **fields,
    )
    fast.chat_template = template
    return fast
