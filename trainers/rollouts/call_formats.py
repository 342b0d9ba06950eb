"""The ways in which models write tool calls, recognised by their chat template. Pure text.

    template ─▶ format_of ─▶ CallFormat      answer's text ─▶ parse ─▶ calls in the model's order, and the text around them

A tokenizer with a response template of its own does not come here. Parsing never raises: what was meant as a call and is none
comes out as a `RequestedCall` with its `problem`, which the model is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call as the model wrote it. `problem`: why it cannot be made; the other fields are then what was readable."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    id: str | None = None  # if the model gave it one


Parsed = tuple[list[RequestedCall], str]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`begins`: whether a text may hold a call at all. `parse(text, schemas)`: its calls, and the text around them."""

    begins: Callable[[str], bool]
    parse: Callable[[str, Sequence[dict]], Parsed]


def call_of(value: Any, call_id: str | None = None) -> RequestedCall:
    """A call from what stood in its JSON: an object with `name`, and `arguments` or `parameters`.

    Arguments may be missing, or written as a string that holds the JSON object.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return RequestedCall("", {}, 'a tool call must be an object {"name": …, "arguments": {…}}')
    name = value["name"]
    arguments = value["arguments"] if "arguments" in value else value.get("parameters", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return RequestedCall(name, {}, f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return RequestedCall(name, {}, f"the arguments must be an object, not {json.dumps(arguments)[:80]}")
    call_id = value.get("id", call_id)
    return RequestedCall(name, arguments, id=call_id if isinstance(call_id, str) else None)


def _loaded(body: str) -> RequestedCall:
    try:
        return call_of(json.loads(body))
    except (ValueError, RecursionError) as error:
        return RequestedCall("", {}, f"the tool call is not valid JSON: {error}")


# Formats: each is one parser --------------------------------------------------------------------------------------------------

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_SPECIAL_END = re.compile(r"\s*<\|?[\w/]+\|?>\s*\Z")  # the end of turn, after a call that was not closed


def _hermes(text: str, schemas: Sequence[dict]) -> Parsed:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5, Qwen 3)."""
    bodies = [_SPECIAL_END.sub("", match) for match in _TAGGED.findall(text)]
    return [_loaded(body) for body in bodies], _TAGGED.sub("", text)


_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>(.*?)</function>\s*(?:</tool_call>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _function_tags(text: str, schemas: Sequence[dict]) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen 3 Coder, Qwen 3.5)."""
    calls = [
        RequestedCall(name, _cast(name, dict(_PARAMETER.findall(body)), schemas)) for name, body in _FUNCTION.findall(text)
    ]
    rest = _FUNCTION.sub("", text)
    if "<tool_call>" in rest or "<function=" in rest:
        calls.append(RequestedCall("", {}, "a tool call is not closed by </function> and </tool_call>"))
    return calls, rest


_KEY_VALUE = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _key_value_tags(text: str, schemas: Sequence[dict]) -> Parsed:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5)."""
    calls = []
    for body in _TAGGED.findall(text):
        name = re.split(r"\s|<", body, maxsplit=1)[0]
        problem = None if name else "a tool call must begin with the tool's name"
        calls.append(RequestedCall(name, _cast(name, dict(_KEY_VALUE.findall(body)), schemas), problem))
    return calls, _TAGGED.sub("", text)


def _cast(name: str, texts: dict[str, str], schemas: Sequence[dict]) -> dict[str, Any]:
    """Argument texts as the schema's types; one that does not fit stays text, for the tool to refuse."""
    parameters = next((tool["function"]["parameters"] for tool in schemas if tool["function"]["name"] == name), {})
    values: dict[str, Any] = {}
    for key, text in texts.items():
        kind = parameters.get("properties", {}).get(key, {}).get("type")
        try:
            values[key] = text if kind == "string" else json.loads(text)
        except (ValueError, RecursionError):
            values[key] = text
    return values


_PYTHON_TAG = "<|python_tag|>"


def _llama(text: str, schemas: Sequence[dict]) -> Parsed:
    """A whole answer of `{"name": …, "parameters": …}`, several with `;` between, maybe after `<|python_tag|>` (Llama 3)."""
    body = text.replace(_PYTHON_TAG, "", 1).lstrip() if _PYTHON_TAG in text else text.lstrip()
    decoder, calls, position = json.JSONDecoder(), [], 0
    try:
        while body[position : position + 1] == "{":
            value, position = decoder.raw_decode(body, position)
            calls.append(call_of(value))
            position += len(body[position:]) - len(body[position:].lstrip("; \n"))
    except (ValueError, RecursionError) as error:
        if _PYTHON_TAG in text or re.match(r'\{\s*"name"\s*:', body):
            return [*calls, RequestedCall("", {}, f"the tool call is not valid JSON: {error}")], ""
        return [], text
    if not calls and _PYTHON_TAG in text:
        return [RequestedCall("", {}, 'a tool call must be an object {"name": …, "parameters": {…}}')], ""
    # An answer in JSON is an answer.
    return ([], text) if any(call.problem and not call.name for call in calls) else (calls, "")


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, schemas: Sequence[dict]) -> Parsed:
    """`[TOOL_CALLS] [{"name": …, "arguments": …}]`, or `[TOOL_CALLS]NAME[ARGS]{…}` once per call (Mistral)."""
    before, *parts = text.split(_MISTRAL)
    decoder, calls = json.JSONDecoder(), []
    for part in parts:
        try:
            if named := _MISTRAL_NAMED.match(part):
                arguments, _ = decoder.raw_decode(part, named.end())
                calls.append(call_of({"name": named[1], "arguments": arguments, "id": named[2]}))
            else:
                value, _ = decoder.raw_decode(part.lstrip())
                calls.extend(call_of(entry) for entry in (value if isinstance(value, list) else [value]))
        except (ValueError, RecursionError) as error:
            calls.append(RequestedCall("", {}, f"the tool call is not valid JSON: {error}"))
    return calls, before


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+?)(?:<｜tool▁sep｜>|\n```json\n)(.*?)(?:\n```)?"
    r"\s*(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
_DEEPSEEK_LIST = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")


def _deepseek(text: str, schemas: Sequence[dict]) -> Parsed:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (DeepSeek V3, V3.1, R1)."""
    calls = [call_of({"name": name.strip(), "arguments": body}) for name, body in _DEEPSEEK.findall(text)]
    return calls, _DEEPSEEK_LIST.sub("", _DEEPSEEK.sub("", text))


def _holds(*marks: str) -> Callable[[str], bool]:
    return lambda text: any(mark in text for mark in marks)


HERMES = CallFormat(_holds("<tool_call>"), _hermes)
FUNCTION_TAGS = CallFormat(_holds("<tool_call>", "<function="), _function_tags)
KEY_VALUE_TAGS = CallFormat(_holds("<tool_call>"), _key_value_tags)
LLAMA = CallFormat(lambda text: _PYTHON_TAG in text or text.lstrip().startswith("{"), _llama)
MISTRAL = CallFormat(_holds(_MISTRAL), _mistral)
DEEPSEEK = CallFormat(_holds("<｜tool▁call▁begin｜>"), _deepseek)


def format_of(template: str) -> CallFormat:
    """The format whose marks a chat template writes; Hermes' if it has none that is known."""
    if "<function=" in template:
        return FUNCTION_TAGS
    if "<arg_key>" in template:
        return KEY_VALUE_TAGS
    if "<tool_call>" in template:
        return HERMES
    if _MISTRAL in template:
        return MISTRAL
    if "<｜tool▁call▁begin｜>" in template:
        return DEEPSEEK
    if _PYTHON_TAG in template or ('"parameters": ' in template and "ipython" in template):
        return LLAMA
    return HERMES
