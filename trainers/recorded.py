"""Recorded sequences, and which of their tokens are trained: prompts with completions, conversations, books. No torch.

    row ─▶ prompt(…) ─▶ Prompt ─▶ recorded(…) ─▶ ids [L], mask [L]

| rows | `completion_only_loss`, by default true | false | with `assistant_only_loss` |
| prompt, completion | the completion | all but the first token | of these, what the assistant says |
| conversation | refused | all but the first token | what the assistant says |
| books | refused | all but the first token | refused |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainers.books.sequences import TOKENS
from trainers.config_sft import SFTConfig
from trainers.data import PromptBuilder
from trainers.errors import ConfigError, DatasetError
from trainers.types import Message, Prompt

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One sequence of L tokens. The first is never trained: nothing predicts it.

    Example: prompt [5, 9] and completion [7, 2] give `token_ids=[5, 9, 7, 2]`, `loss_mask=[F, F, T, T]`.
    """

    messages: list[Message]  # of the completion; none where there is no prompt apart
    token_ids: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]


class RecordedRows(Protocol):
    """Rows of a dataset as recorded sequences."""

    def prompt(self, epoch: int, row_index: int, row: dict[str, Any]) -> Prompt: ...
    def recorded(self, prompt: Prompt) -> Recorded: ...


def recorded_rows(tokenizer: Any, config: SFTConfig) -> RecordedRows:
    """What reads the rows of this config.

    Raises:
        ConfigError: the tokenizer cannot tell what the assistant says.
    """
    return BookRows() if config.books is not None else ConversationRows(tokenizer, config)


class BookRows:
    """Sequences of `trainers.books.sequences`: every token but the first is trained."""

    def prompt(self, epoch: int, row_index: int, row: dict[str, Any]) -> Prompt:
        return Prompt(epoch, row_index, [], {}, row[TOKENS][:1], row)

    def recorded(self, prompt: Prompt) -> Recorded:
        return Recorded([], prompt.data[TOKENS], _all_but_the_first(len(prompt.data[TOKENS])))


class ConversationRows(PromptBuilder):
    """Prompts with completions, or whole conversations, by the tokenizer's chat template (or plain text without one)."""

    def __init__(self, tokenizer: Any, config: SFTConfig) -> None:
        super().__init__(tokenizer, config)
        self._config = config
        self._assistant_only = config.assistant_only_loss
        self._completion_only = config.completion_only_loss is not False and config.dataset.messages_column is None
        if self._assistant_only:
            _check_marks(tokenizer)

    def prompt(self, epoch: int, row_index: int, row: dict[str, Any]) -> Prompt:
        column = self._config.dataset.messages_column
        if column is None:
            return super().prompt(epoch, row_index, row)
        columns = {name: value for name, value in row.items() if name != column}
        messages = self.conversation(row, column)
        return Prompt(epoch, row_index, messages, columns, self.chat.encode(self.chat.render(messages, generation=False)), row)

    def conversation(self, row: dict[str, Any], column: str) -> list[Message]:
        """Raises `DatasetError`: the row holds none."""
        value, system = row.get(column), self._config.dataset.system_prompt
        if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m for m in value):
            raise DatasetError(f"column `{column}` holds {value!r:.80}: it must be a non-empty list of chat messages")
        return [*([{"role": "system", "content": system}] if system is not None else []), *map(dict, value)]

    def recorded(self, prompt: Prompt) -> Recorded:
        if self._config.dataset.messages_column is not None:
            completion, ids = [], prompt.token_ids
        else:
            completion, answer = self.completion_ids(prompt, prompt.data)
            ids = np.concatenate([prompt.token_ids, answer])
        mask = _all_but_the_first(len(ids))
        if self._completion_only:
            mask[: len(prompt.token_ids)] = False
        if self._assistant_only:
            marks = self._assistants(prompt, completion)[: len(mask)]
            mask[: len(marks)] &= marks  # beyond them is at most the end of turn that the template does not write
        return Recorded(completion, ids, mask)

    def _assistants(self, prompt: Prompt, completion: list[Message]) -> np.ndarray:
        """bool: tokens of the rendered conversation that the template marks as the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {**self.tokenizer.special_tokens_map, **(self._config.chat_template_kwargs or {})}
        rendered: Any = render_jinja_template(
            [[*prompt.messages, *completion]],
            chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **options,
        )
        text, spans = rendered[0][0], rendered[1][0]
        # Tokenized in the same two parts as the ids.
        first = len(self.chat.render(prompt.messages)) if completion else len(text)
        masks = []
        for start, part in ((0, text[:first]), (first, text[first:])):
            offsets = self.tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T + start
            masks.append(np.zeros(len(offsets), bool))
            for span_begin, span_end in spans:
                masks[-1] |= (begins < span_end) & (ends > span_begin)
        return np.concatenate(masks)


def _all_but_the_first(length: int) -> np.ndarray:
    mask = np.ones(length, bool)
    mask[:1] = False
    return mask


def _check_marks(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "assistant_only_loss: the tokenizer has no chat template, so nothing tells the assistant's tokens from others; set "
            "completion_only_loss, or give the tokenizer a template and save it with the model"
        )
    if not _GENERATION.search(str(tokenizer.get_chat_template())):
        raise ConfigError(
            "assistant_only_loss: the tokenizer's chat template does not mark what the assistant says: write "
            "{% generation %} … {% endgeneration %} around it in `tokenizer.chat_template`, and save it with the model"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("assistant_only_loss: this tokenizer does not tell where in a text its tokens stand; use a fast one")
