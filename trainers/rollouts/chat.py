"""Message lists to token ids by the tokenizer's chat template, and sampled ids back to an assistant message.

    messages ─▶ render (template, with tools) ─▶ encode ─▶ prompt ids ─▶ server ─▶ output ids ─▶ read ─▶ message, calls

Invariants:
- the ids of a message list are those `tokenizer(template(messages))` gives, by whichever way they are made; in particular
  every turn's prompt is the whole conversation's, although only what follows the last turn's header is tokenized again;
- reading never raises for what a model wrote: a call that cannot be read becomes one with a `problem`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainers.errors import ConfigError
from trainers.rollouts.call_formats import RequestedCall, call_of, format_of
from trainers.types import Message


@dataclass(frozen=True, slots=True)
class Said:
    """What the model said in one turn: the message for the history, and the tool calls in it, in its order."""

    message: Message
    calls: list[RequestedCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered message list. Another text that begins with `text[:cut]` has ids that begin with `ids[:kept]`."""

    text: str
    ids: np.ndarray  # int32 [P]
    cut: int  # 0: nothing is known of texts that begin alike
    kept: int


class Chat:
    """A tokenizer with its chat template (plain text without one) and the tools every prompt shows.

    Args:
        template_kwargs: further arguments of the template.
        tools: JSON schemas of the tools, as `transformers.utils.get_json_schema` gives them.

    Raises:
        ConfigError: there are tools, and the template would not show them to the model.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None, tools: Sequence[dict] = ()) -> None:
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._kwargs = dict(template_kwargs or {})
        self._tools = list(tools)
        self._backend = backend_of(tokenizer)
        self._decodes_plainly = self._backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", True)
        self._cuts = _cuts_of(self._backend) if self.has_template else {}
        if self._tools:
            self._kwargs["tools"] = self._tools
            template = _template_text(tokenizer, self._tools)
            if not re.search(r"\btools\b", template):
                names = ", ".join(tool["function"]["name"] for tool in self._tools)
                raise ConfigError(
                    f"there are tools ({names}), but the tokenizer's chat template does not mention `tools`: the model would "
                    "never see them. Use a model whose template renders tools, or set `tokenizer.chat_template` to one that "
                    "does and save it with the model"
                )
            self._format = format_of(template)
            self._writes_ids = re.search(r"tool_call_id|\.id\b|\['id'\]|\[\"id\"\]", template) is not None
            self._has_response_template = getattr(tokenizer, "response_template", None) is not None

    def render(self, messages: Sequence[Message], generation: bool = True) -> str:
        """The text of a message list; `generation`: with what begins an answer."""
        if not self.has_template:
            return "".join(str(message["content"]) for message in messages)
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, **self._kwargs
        )

    def encode(self, text: str) -> np.ndarray:
        """int32 [P]: the ids of rendered text. A template writes its own special tokens."""
        special, backend = not self.has_template, self._backend
        # A hook may have used the tokenizer with padding or truncation, which stay set until the next plain call.
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return np.array(self.tokenizer(text, add_special_tokens=special)["input_ids"], np.int32)
        return np.array(backend.encode_batch_fast([text], add_special_tokens=special)[0].ids, np.int32)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [P]: the rendering with what begins an answer."""
        return self.encode(self.render(messages))

    def rendered(self, messages: Sequence[Message], before: Rendered | None = None) -> Rendered:
        """The prompt of a message list; of its text, what is known from a prompt `before` is not tokenized again."""
        text = self.render(messages)
        if before is not None and before.cut and text.startswith(before.text[: before.cut]):
            ids = np.concatenate([before.ids[: before.kept], self.encode(text[before.cut :])])
        else:
            ids = self.encode(text)
        return Rendered(text, ids, *self._last_cut(text, ids))

    def known(self, messages: Sequence[Message], ids: np.ndarray) -> Rendered:
        """The prompt of a message list whose ids were made before."""
        text = self.render(messages)
        return Rendered(text, ids, *self._last_cut(text, ids))

    def _last_cut(self, text: str, ids: np.ndarray) -> tuple[int, int]:
        """Where the last token begins at which a text may be tokenized in two parts: its character, and its place in `ids`."""
        cut, token = max(((text.rfind(content), token) for content, token in self._cuts.items()), default=(-1, -1))
        places = np.flatnonzero(ids == token)
        return (cut, int(places[-1])) if cut > 0 and len(places) else (0, 0)

    def text(self, ids: np.ndarray, special: bool = False) -> str:
        """Text of ids; special tokens only if asked for."""
        decoder = self._backend if self._decodes_plainly else self.tokenizer
        return decoder.decode(ids.tolist(), skip_special_tokens=not special)

    def read(self, prompt_ids: np.ndarray, output_ids: np.ndarray) -> Said:
        """The message sampled after a prompt. Tool calls are looked for only where there are tools."""
        if not self._tools:
            return Said(self.as_text(output_ids))
        if self._has_response_template:
            return self._read_by_template(prompt_ids, output_ids)
        marked = self.text(output_ids, special=True)
        if not self._format.begins(marked):
            return Said(self.as_text(output_ids))
        calls, rest = self._format.parse(marked, self._tools)
        if not calls:
            return Said(self.as_text(output_ids))
        for token in getattr(self.tokenizer, "all_special_tokens", ()):
            rest = rest.replace(token, "")
        return self._said({"role": "assistant", "content": rest.strip("\n")}, calls, output_ids)

    def _read_by_template(self, prompt_ids: np.ndarray, output_ids: np.ndarray) -> Said:
        """With the parser that comes with the tokenizer."""
        try:
            message = self.tokenizer.parse_response(output_ids.tolist(), prefix=prompt_ids.tolist(), tools=self._tools)
            calls = [call_of(entry["function"], entry.get("id")) for entry in message.get("tool_calls") or []]
        except Exception as error:  # whatever its parser thinks of what the model wrote
            message = {"role": "assistant"}
            calls = [RequestedCall("", {}, f"the tool call cannot be read: {error}")]
        message = {"content": "", **message}
        message.pop("tool_calls", None)
        return self._said(message, calls, output_ids) if calls else Said(message)

    def as_text(self, output_ids: np.ndarray) -> Message:
        """The message of a turn with its calls as the model wrote them."""
        return {"role": "assistant", "content": self.text(output_ids)}

    def _said(self, message: Message, calls: list[RequestedCall], output_ids: np.ndarray) -> Said:
        if any(call.problem for call in calls):
            # No template could write a broken call as the model did: it stays in the history as text, token for token, so that
            # what is trained is what was sampled, and the tool's answer says what is wrong with it.
            return Said(self.as_text(output_ids), calls)
        if self._writes_ids:  # nine letters and digits are what the strictest template asks for
            calls = [replace(call, id=call.id or f"call{number:05}") for number, call in enumerate(calls)]
        entries = []
        for call in calls:
            entry: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            entries.append({"id": call.id, **entry} if call.id is not None else entry)
        return Said({**message, "tool_calls": entries}, calls)


def _template_text(tokenizer: Any, tools: list[dict]) -> str:
    """The template used when there are tools: some tokenizers have a named one for that."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return str(tokenizer.get_chat_template(None, tools) if hasattr(tokenizer, "get_chat_template") else tokenizer.chat_template)


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` behind a fast tokenizer that adds nothing of its own to it, else None.

    Called directly it does without what transformers checks at every call and without character offsets: a third of the time.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast") or getattr(tokenizer, "split_special_tokens", True):
        return None
    ways = [
        getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus", "_batch_encode_plus", "decode", "_decode")
    ]
    if not all(way is None or way.__module__.startswith("transformers.tokenization_utils") for way in ways):
        return None
    tokenizer("")  # clears the padding and truncation its file may ask for, as every call does
    return backend


def _cuts_of(backend: Any) -> dict[str, int]:
    """Special tokens before which a text may be cut, and tokenizes to the same ids in two parts: content → id.

    Tokenizers take special tokens out of a text first and work on what lies between them piece by piece. Left out are those
    that take white space before them along, and those that are found in normalized text only or can be part of another.
    """
    if backend is None or backend.encode_special_tokens:
        return {}
    added = {token.content: (number, token) for number, token in backend.get_added_tokens_decoder().items()}
    cuts: dict[str, int] = {}
    for content, (number, token) in added.items():
        apart = not any(content in other for other in added if other != content)
        if token.special and not (token.normalized or token.lstrip or token.single_word) and apart and len(content) > 1:
            cuts[content] = number
    return cuts
