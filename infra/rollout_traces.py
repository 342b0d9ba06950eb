"""Kept rollouts as MLflow traces: one span for the rollout, below it one per turn and per tool call.

    row with `trace` ─trace_record─▶ outbox (held like metrics) ─▶ sender ─mlflow_trace─▶ MLflow

The id is given when the record is written, and spans are numbered in it: sent again, a trace replaces itself.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

MAX_PREVIEW_CHARS = 500
_TEXTS = ("prompt", "completion", "trace", "step")  # of a row: what a trace has in another place


def trace_record(row: dict[str, Any], run_name: str, step: int) -> dict[str, Any]:
    """What is stored of a trace.

    Args:
        row: of the rollouts table, with `trace`: `{began_s, ended_s, inputs, outputs, spans: [{name, type, began_s, ended_s,
            inputs, outputs, attributes, error}]}`; times are Unix seconds. The row's other cells become attributes.
    """
    attributes = {key: value for key, value in row.items() if key not in _TEXTS}
    trace = row["trace"]
    if left_out := trace.get("spans_left_out"):
        attributes["spans_left_out"] = left_out
    return {
        "id": f"tr-{uuid.uuid4().hex}",
        "began_s": trace["began_s"],
        "ended_s": trace["ended_s"],
        "inputs": trace["inputs"],
        "outputs": trace["outputs"],
        "prompt": str(row.get("prompt", "")),
        "completion": str(row.get("completion", "")),
        "attributes": {"run": run_name, "step": step, **attributes},
        "spans": trace["spans"],
    }


def mlflow_trace(trace: dict[str, Any], run_id: str, experiment_id: str) -> tuple[TraceInfo, list[Span]]:
    """The trace in MLflow's own terms, root span first. By its source run MLflow shows it with the run."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    info = TraceInfo(
        trace_id=trace["id"],
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=round(trace["began_s"] * 1e3),
        execution_duration=round((trace["ended_s"] - trace["began_s"]) * 1e3),
        state=TraceState.OK,
        request_preview=trace["prompt"][:MAX_PREVIEW_CHARS],
        response_preview=trace["completion"][:MAX_PREVIEW_CHARS],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        tags={TraceTagKey.TRACE_NAME: "rollout", **_tags(trace["attributes"])},
    )
    root = {**trace, "name": "rollout", "type": "AGENT", "error": False}
    return info, [_span(trace["id"], number, span) for number, span in enumerate([root, *trace["spans"]], start=1)]


def _nanoseconds(time_s: float) -> int:
    return round(time_s * 1e6) * 1000  # a Unix time as a float holds microseconds


def _tags(attributes: dict[str, Any]) -> dict[str, str]:
    """What traces are searched and filtered by."""
    shown = {name: attributes.get(name) for name in ("run", "step", "reward", "outcome")}
    shown["prompt"] = f"{attributes.get('epoch')}:{attributes.get('row')}"
    return {f"loopwright.{name}": str(value) for name, value in shown.items() if value is not None}


def _span(trace_id: str, number: int, span: dict[str, Any]) -> Span:
    from mlflow.entities import Span
    from mlflow.tracing.constant import SpanAttributeKey
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    def context(span_id: int) -> SpanContext:
        number = int(trace_id.removeprefix("tr-"), 16)
        return SpanContext(number, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    attributes = {
        SpanAttributeKey.REQUEST_ID: trace_id,
        SpanAttributeKey.SPAN_TYPE: span["type"],
        SpanAttributeKey.INPUTS: span["inputs"],
        SpanAttributeKey.OUTPUTS: span["outputs"],
        **span["attributes"],
    }
    if span["type"] == "CHAT_MODEL":
        used, made = span["attributes"]["prompt_tokens"], span["attributes"]["tokens"]
        attributes[SpanAttributeKey.CHAT_USAGE] = {"input_tokens": used, "output_tokens": made, "total_tokens": used + made}
    return Span(
        ReadableSpan(
            name=span["name"],
            context=context(number),
            parent=context(1) if number > 1 else None,
            resource=Resource.get_empty(),
            attributes={key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
            status=Status(StatusCode.ERROR, str(span["outputs"])) if span["error"] else Status(StatusCode.OK),
            start_time=_nanoseconds(span["began_s"]),
            end_time=_nanoseconds(span["ended_s"]),
        )
    )
