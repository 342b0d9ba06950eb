"""What vLLM's two generation endpoints answer, as a `TurnRecord`.

    bytes ─▶ typed structs ─▶ arrays: ids, logprobs, version spans; with the form's asking, top logprobs and candidate sets

The structs hold what a run uses and nothing else: what they do not declare is skipped unread, so an answer of which only the
sampled logprobs count costs little although the server writes more.
"""

from __future__ import annotations

import itertools
import logging
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from trainers.errors import ServerError
from trainers.rollouts.protocol import RequestFailed, Retryable, SamplingForm
from trainers.types import TurnRecord, VersionSpan

logger = logging.getLogger(__name__)

_NO_LOGPROB = -9999.0  # how vLLM writes −inf and NaN
_TOKEN_ID = "token_id:"  # how it writes a token where others expect its text


class _Sampled(msgspec.Struct, gc=False):
    """An entry of `/inference/v1/generate`'s `logprobs.content`, without the top tokens."""

    logprob: float


class _Top(msgspec.Struct, gc=False):
    logprob: float
    token_id: int = -1
    token: str = ""  # older servers: `token_id:N`


class _WithTops(msgspec.Struct, gc=False):
    logprob: float
    top_logprobs: list[_Top] = []


class _Arrays(msgspec.Struct, gc=False):
    """float32 and int32 [tokens, columns]: the sampled token's, then the likeliest ones'. No ids if there is one column."""

    columns: int
    logprobs: bytes
    ids: bytes = b""


class _Logprobs(msgspec.Struct, gc=False):
    arrays: _Arrays | None = None  # /inference/v1/generate of a server with our plugin
    content: list[_Sampled] | None = None  # /inference/v1/generate
    token_logprobs: list[float | None] | None = None  # /v1/completions


class _TopLogprobs(msgspec.Struct, gc=False):
    arrays: _Arrays | None = None
    content: list[_WithTops] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Version(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


L = TypeVar("L", _Logprobs, _TopLogprobs)


class _Choice(msgspec.Struct, Generic[L]):
    finish_reason: str | None
    token_ids: list[int] | None
    logprobs: L | None = None
    weight_versions: list[_Version] | None = None
    sampling_mask: msgspec.Raw = msgspec.Raw(b"null")


class _Answer(msgspec.Struct, Generic[L]):
    choices: list[_Choice[L]]


_PLAIN_DECODER = msgspec.json.Decoder(_Answer[_Logprobs])
_TOP_DECODER = msgspec.json.Decoder(_Answer[_TopLogprobs])
_MASK_DECODER = msgspec.json.Decoder(list[list[int]] | None)


def read_answer(
    form: SamplingForm, data: bytes, prompt_ids: np.ndarray, version: int | None, by_adapter: bool = False
) -> TurnRecord:
    """The turn of an answer of status 200 to a request of that form. `by_adapter`: `version` is that of the adapter it named,
    and what the server says of versions is of its base model.

    Raises:
        Retryable: the body is no such answer, or the server aborted the request.
        RequestFailed: the answer cannot be trained on.
        ServerError: the server no longer holds the weights it was given.
    """
    decoder: Any = _TOP_DECODER if form.top_logprobs else _PLAIN_DECODER
    try:
        choice = decoder.decode(data).choices[0]
        mask = _MASK_DECODER.decode(choice.sampling_mask) if form.candidates else None
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise Retryable("bad_json", f"not an answer: {type(error).__name__}: {error}: {data[:200]!r}") from error
    if choice.finish_reason not in ("stop", "length"):
        raise Retryable("aborted", f"the server ended the request with {choice.finish_reason!r}")
    output_ids = np.array(choice.token_ids or [], dtype=np.int32)
    turn = TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_logprobs=_sampled_logprobs(choice.logprobs, len(output_ids)),
        spans=_spans(None if by_adapter else choice.weight_versions, len(output_ids), version),
        finish_reason=choice.finish_reason,
    )
    if form.top_logprobs:
        turn.top_ids, turn.top_logprobs = _tops(choice.logprobs, len(output_ids), form.top_logprobs)
    if form.candidates:
        turn.candidate_ids, turn.candidate_counts = _candidates(mask, len(output_ids))
    return turn


def _sampled_logprobs(logprobs: _Logprobs | _TopLogprobs | None, length: int) -> np.ndarray:
    """float32 [length]."""
    values: Any = []
    if logprobs is not None and logprobs.arrays is not None:
        values = _table(logprobs.arrays.logprobs, "<f4", logprobs.arrays.columns)[:, 0]
    elif logprobs is not None and logprobs.token_logprobs is not None:
        values = logprobs.token_logprobs
    elif logprobs is not None:
        values = [entry.logprob for entry in logprobs.content or []]
    if len(values) != length:
        raise RequestFailed("bad_answer", f"the server sent {len(values)} logprobs for {length} tokens")
    array = np.array(values, dtype=np.float32)  # None becomes NaN
    if length and not array.min() > _NO_LOGPROB:
        raise RequestFailed("bad_logprob", "the server has no finite logprob for a token it sampled: its weights may hold NaN")
    return array


def _tops(logprobs: _TopLogprobs | None, length: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The `top_k` likeliest ids and their logprobs, int32 and float32 [length, top_k], likeliest first; −1 and −inf: none.

    The server lists the sampled token first and then the others by rank. What is taken must not depend on the token that was
    sampled, or the expectation over it is another: so the likeliest of all that are listed, ties by id.
    """
    if logprobs is not None and logprobs.arrays is not None:
        columns = logprobs.arrays.columns
        told = _table(logprobs.arrays.ids, "<i4", columns)[:, 1:], _table(logprobs.arrays.logprobs, "<f4", columns)[:, 1:]
        counts = [columns - 1] * len(told[0]) if told[0].shape == told[1].shape else []
        flat_ids, flat_logprobs = told[0].flatten(), told[1].flatten()
    elif logprobs is not None and logprobs.content is not None:
        counts = [len(entry.top_logprobs) for entry in logprobs.content]
        entries = [top for entry in logprobs.content for top in entry.top_logprobs]
        flat_ids = [top.token_id for top in entries]
        if flat_ids and flat_ids[0] < 0:
            flat_ids = [_token_id(top.token) for top in entries]
        flat_logprobs = [top.logprob for top in entries]
    else:
        tables = [table or {} for table in (logprobs and logprobs.top_logprobs) or []]
        counts = [len(table) for table in tables]
        flat_ids = [_token_id(token) for table in tables for token in table]
        flat_logprobs = [logprob for table in tables for logprob in table.values()]
    if len(counts) != length or (length and not len(flat_ids)):
        raise RequestFailed("bad_answer", f"the server sent {len(flat_ids)} top logprobs for {length} tokens, not {top_k} each")
    widths = np.array(counts, np.int64)
    width = max(int(widths.max(initial=0)), top_k)
    listed = np.arange(width) < widths[:, None]
    ids = np.full((length, width), -1, np.int32)
    values = np.full((length, width), -np.inf, np.float32)
    ids[listed], values[listed] = flat_ids, flat_logprobs
    # Not among the candidates: no token of the sampler.
    values[~(values > _NO_LOGPROB)] = -np.inf
    ids[values == -np.inf] = -1
    order = np.lexsort((ids, -values))[:, :top_k]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def _table(data: bytes, kind: str, columns: int) -> np.ndarray:
    try:
        return np.frombuffer(data, kind).reshape(-1, columns)
    except ValueError as error:
        raise RequestFailed("bad_answer", f"the server sent {len(data)} bytes for {columns} columns of {kind}") from error


def _token_id(token: str) -> int:
    if not token.startswith(_TOKEN_ID):
        raise RequestFailed("bad_answer", f"the server names a token by its text ({token!r}): its id is needed")
    return int(token[len(_TOKEN_ID) :])


def _candidates(mask: list[list[int]] | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`candidate_ids` and `candidate_counts` of a turn; a server that does not tell them gives none for every token."""
    if mask is None:
        if length:
            _warn_of_no_candidates()
        return np.zeros(0, np.int32), np.zeros(length, np.int32)
    if len(mask) != length:
        raise RequestFailed("bad_answer", f"the server sent {len(mask)} candidate sets for {length} tokens")
    counts = np.array([len(ids) for ids in mask], np.int32)
    return np.fromiter(itertools.chain.from_iterable(mask), np.int32, int(counts.sum())), counts


@cache
def _warn_of_no_candidates() -> None:
    logger.warning(
        "the server does not say which tokens each one was sampled among (top_k, top_p, min_p): the policy is normalised over "
        "the whole vocabulary and the ratio to the sampler is biased. On a GPU with vLLM 0.28 or newer, start it with "
        "--return-sampling-mask --enable-scale-out"
    )


def _spans(weight_versions: list[_Version] | None, length: int, version: int | None) -> list[VersionSpan]:
    """The server's version spans; everything is stamped with the `version` at dispatch if it has none.

    Raises:
        ServerError: it serves weights that are older than those it confirmed, or that nobody numbered: it was restarted.
    """
    if weight_versions is None or version is None:
        return [VersionSpan(0, length, version or 0)]
    for span in weight_versions:
        if not str(span.version).isdecimal() or int(span.version) < version:
            raise ServerError(
                f"the server answered with weights {span.version!r} although it holds version {version}: it was restarted, "
                "or somebody else changed its weights"
            )
    spans = [VersionSpan(span.start, span.end, int(span.version)) for span in weight_versions]
    bounds = [0, *(span.stop for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != length:
        raise RequestFailed("bad_answer", f"the server's version spans {weight_versions} do not cover {length} tokens")
    return spans
