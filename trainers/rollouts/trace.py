"""A rollout as spans, for people to look at: one per turn and per tool call, with what went in, what came out, and when.

Plain JSON of a bounded size: it travels in the header of a step's message, and what keeps it imports nothing from here.
"""

from __future__ import annotations

import math
import time
from typing import Any

from trainers.types import Message, Rollout, ToolCall, TurnRecord

MAX_TEXT_CHARS = 4000
MAX_TRACE_CHARS = 200_000
MAX_SPANS = 200


def rollout_trace(rollout: Rollout) -> dict[str, Any]:
    """The conversation as spans with Unix times: `{began_s, ended_s, inputs, outputs, spans: [{name, type, began_s, ended_s,
    inputs, outputs, attributes, error}], spans_left_out}`, in order of time. Texts are cut, to a total as well."""
    began, ended = _times(rollout)
    bounded = _Bounded(MAX_TRACE_CHARS)
    trace: dict[str, Any] = {
        "began_s": began,
        "ended_s": ended,
        "inputs": bounded({"messages": rollout.prompt.messages}),
        "outputs": bounded(rollout.completion[-1] if rollout.completion else None),
    }
    calls: dict[int, list[ToolCall]] = {}
    for call in rollout.tool_calls:
        calls.setdefault(call.turn, []).append(call)
    drift = rollout.reconciled.drift if rollout.reconciled is not None else []
    messages = _by_turn(rollout)
    spans: list[dict[str, Any]] = []
    for number, turn in enumerate(rollout.turns):
        given, written = messages[number] if number < len(messages) else ([], None)
        attributes = _turn_attributes(turn)
        if 0 < number <= len(drift):
            attributes |= {"drift": drift[number - 1].kind, "drift_tokens": drift[number - 1].tokens}
        times = (turn.began_s or began, turn.ended_s or turn.began_s or ended)
        inputs, outputs = bounded({"messages": given}), bounded(written)
        spans.append(_span(f"turn {number + 1}", "CHAT_MODEL", *times, inputs, outputs, attributes))
        for call in calls.get(number, []):
            times = (call.began_s, call.began_s + call.latency_s)
            inputs, outputs = bounded(call.arguments), bounded(call.result)
            spans.append(
                _span(call.name or "unreadable call", "TOOL", *times, inputs, outputs, {"turn": number + 1}, call.error)
            )
    return {**trace, "spans": spans[:MAX_SPANS], "spans_left_out": max(len(spans) - MAX_SPANS, 0)}


def _span(
    name: str,
    kind: str,
    began_s: float,
    ended_s: float,
    inputs: Any,
    outputs: Any,
    attributes: dict[str, Any],
    error: bool = False,
) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "began_s": began_s,
        "ended_s": ended_s,
        "inputs": inputs,
        "outputs": outputs,
        "attributes": attributes,
        "error": error,
    }


def _turn_attributes(turn: TurnRecord) -> dict[str, Any]:
    return {
        "prompt_tokens": len(turn.prompt_ids),
        "tokens": len(turn.output_ids),
        "finish_reason": turn.finish_reason,
        "versions": [[span.start, span.stop, span.version] for span in turn.spans],
    }


def _times(rollout: Rollout) -> tuple[float, float]:
    """When the rollout began and ended; its own turns and calls say when, where a hook has not made them without times."""
    begins = [turn.began_s for turn in rollout.turns if turn.began_s] + [call.began_s for call in rollout.tool_calls]
    ends = [turn.ended_s for turn in rollout.turns] + [call.began_s + call.latency_s for call in rollout.tool_calls]
    began = min(begins, default=time.time() - rollout.duration_s)
    return began, max([began + rollout.duration_s, *ends])


def _by_turn(rollout: Rollout) -> list[tuple[list[Message], Message]]:
    """Per message of the model: what it was given since its last one (first the prompt), and the message."""
    turns: list[tuple[list[Message], Message]] = []
    given = list(rollout.prompt.messages)
    for message in rollout.completion:
        if message.get("role") == "assistant":
            turns.append((given, message))
            given = []
        else:
            given.append(message)
    return turns


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, and how many there were."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


class _Bounded:
    """Makes plain JSON of values, long texts cut; once about `left` characters are used up, the rest is left out."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, value: Any) -> Any:
        if self.left <= 0:
            return "…"
        self.left -= 8  # what is no text takes room too
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, dict):
            return {str(key): self(item) for key, item in value.items() if self.left > 0}
        if isinstance(value, list | tuple):
            return [self(item) for item in value if self.left > 0]
        text = cut(str(value), max(min(MAX_TEXT_CHARS, self.left), 0))
        self.left -= len(text)
        return text
