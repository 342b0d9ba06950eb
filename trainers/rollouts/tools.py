"""The functions a model may call: their schemas, and what becomes of the calls of a turn.

    calls of a turn ─▶ one after another, in the model's order ─▶ ToolCall record + tool message each

Invariants:
- every call gives one message: its result, or what is wrong with it (no such tool, arguments that do not fit, an exception);
- only a tool that does not return in time fails its rollout;
- names are Python identifiers and unique, so metric names are too; a name the model made up never becomes one.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainers.errors import ConfigError
from trainers.rollouts.call_formats import RequestedCall
from trainers.rollouts.protocol import RequestFailed
from trainers.rollouts.side_calls import CallTimeout, SideCalls
from trainers.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Tool:
    """A function under the name the model calls it by."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    schema: dict[str, Any]
    of_environment: bool = False


def make_tool(function: Callable[..., Any], of_environment: bool = False) -> Tool:
    """A tool from a function, a `functools.partial` of one (its bound arguments are not shown to the model) or a method.

    Raises:
        ConfigError: the model could not be told how to call it; the message says what to write.
    """
    bound: set[str] = set()
    inner = function
    while isinstance(inner, functools.partial):
        if inner.args:
            raise ConfigError(f"tool {function!r} binds arguments by position: bind them by name, `partial(f, key=value)`")
        bound |= set(inner.keywords)
        inner = inner.func
    name = getattr(inner, "__name__", None)
    if inspect.isclass(inner) or not callable(inner) or name is None:
        raise ConfigError(f"tool {inner!r} is a {type(inner).__name__}: the model calls a tool by its name, so pass a function")
    if not name.isidentifier():
        raise ConfigError(f"tool {inner!r} has no name the model could call it by: write it as a function with `def`")
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(inner)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be told how to call tool `{name}`: {error}. Give it a docstring with a description and an "
            "`Args:` section that describes every parameter, and every parameter a type"
        ) from error
    parameters = schema["function"]["parameters"]
    parameters["properties"] = {key: value for key, value in parameters["properties"].items() if key not in bound}
    if "required" in parameters:
        parameters["required"] = [key for key in parameters["required"] if key not in bound]
    return Tool(name, function, inspect.signature(function), schema, of_environment)


class Toolbox:
    """The tools of a run, or of one rollout once an environment's methods are among them.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two tools are called `{twice}`: the model calls a tool by its name, so rename one")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template shows of each tool."""
        return [tool.schema for tool in self.tools.values()]

    def bound_to(self, environment: Any) -> Toolbox:
        """The same tools, with an environment's methods being those of this object."""
        return Toolbox(
            [
                replace(tool, function=getattr(environment, tool.name)) if tool.of_environment else tool
                for tool in self.tools.values()
            ]
        )

    async def run(self, calls: Sequence[RequestedCall], turn: int, side: SideCalls) -> tuple[list[ToolCall], list[Message]]:
        """Make the calls of a turn, one after another.

        Raises:
            RequestFailed: a tool did not return in time.
        """
        records, messages = [], []
        for call in calls:
            began_s, began = time.time(), time.monotonic()
            result, error = await self._call(call, side)
            # Half a surrogate pair, from the model's JSON or a file name, is no text that a tokenizer takes.
            result = result.encode("utf-8", "replace").decode()
            records.append(ToolCall(turn, call.name, call.arguments, result, error, began_s, time.monotonic() - began))
            message: Message = {"role": "tool", "name": call.name, "content": result}
            messages.append({**message, "tool_call_id": call.id} if call.id is not None else message)
        return records, messages

    async def _call(self, call: RequestedCall, side: SideCalls) -> tuple[str, bool]:
        """The message for the model, and whether the call failed."""
        if call.problem is not None:
            return _error(call.problem), True
        tool = self.tools.get(call.name)
        if tool is None:
            return _error(f"unknown tool {call.name!r}; there are: {', '.join(self.tools)}"), True
        try:
            tool.signature.bind(**call.arguments)
        except TypeError as error:
            return _error(f"arguments that {call.name} does not take: {error}"), True
        try:
            return str(await side.call(tool.function, **call.arguments)), False
        except CallTimeout as error:
            raise RequestFailed("tool_timeout", str(error)) from error
        except Exception as error:
            return _error(f"{type(error).__name__}: {error}"), True


def _error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
