"""The two generation endpoints of vLLM as they travel: a turn's request body, and its answer as a `TurnRecord`.

`/inference/v1/generate` where the server has it (it says which policy version sampled which tokens), else `/v1/completions`,
stamped with the version known at dispatch. No connection here: `client` sends, this module only knows the bodies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.config import AsyncTrainerConfig
from trainers.errors import ServerError
from trainers.types import TurnRecord, VersionSpan

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
_NO_LOGPROB = -9999.0  # how vLLM writes −inf and NaN


class RequestFailed(Exception):
    """A request was given up. `cause` is short and countable (`http_400`, `timeout`, …); the message has the details."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Retryable(Exception):
    """An attempt failed in a way that another may not. `cause` as in `RequestFailed`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class SamplingForm:
    """What every request of a run asks for beside its own temperature, length and seed."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: AsyncTrainerConfig) -> SamplingForm:
        return cls(config.top_p, config.top_k, config.min_p or 0.0, config.repetition_penalty)


PLAIN = SamplingForm()


def request_body(
    form: SamplingForm,
    generate: bool,
    model: str,
    prompt_ids: np.ndarray,
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    version: int | None,
) -> tuple[str, bytes]:
    """Path and JSON body of one turn. `generate`: the server has `/inference/v1/generate`."""
    # Neutral values are said, because the server would otherwise take those of the model's generation config.
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": form.top_p,
        "top_k": form.top_k,
        "min_p": form.min_p,
        "repetition_penalty": form.repetition_penalty,
        "max_tokens": max_tokens,
        "seed": seed,
        "logprobs": 0,  # the sampled token's alone
    }
    # Cached prefixes are only shared within one policy version.
    body: dict[str, Any] = {"model": model, "cache_salt": str(version)}
    if generate:
        body |= {"token_ids": prompt_ids.tolist(), "sampling_params": {**sampling, "detokenize": False}}
        return GENERATE, json.dumps(body).encode()
    body |= {"prompt": prompt_ids.tolist(), "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}
    return COMPLETIONS, json.dumps(body).encode()


def read_answer(data: bytes, prompt_ids: np.ndarray, version: int | None) -> TurnRecord:
    """The turn of an answer of status 200.

    Raises:
        Retryable: the body is no such answer, or the server aborted the request.
        RequestFailed: the answer cannot be trained on.
        ServerError: the server no longer holds the weights it was given.
    """
    try:
        choice = json.loads(data)["choices"][0]
        return _turn(choice, prompt_ids, version)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Retryable("bad_json", f"not an answer: {type(error).__name__}: {error}: {data[:200]!r}") from error


def _turn(choice: dict[str, Any], prompt_ids: np.ndarray, version: int | None) -> TurnRecord:
    """One choice of either endpoint."""
    if choice["finish_reason"] not in ("stop", "length"):
        raise Retryable("aborted", f"the server ended the request with {choice['finish_reason']!r}")
    output_ids = np.array(choice["token_ids"] or [], dtype=np.int32)
    logprobs = choice["logprobs"] or {}
    values = (
        logprobs["token_logprobs"] if "token_logprobs" in logprobs else [e["logprob"] for e in logprobs.get("content") or []]
    )
    if len(values) != len(output_ids):
        raise RequestFailed("bad_answer", f"the server sent {len(values)} logprobs for {len(output_ids)} tokens")
    if min(values, default=0.0) <= _NO_LOGPROB:
        raise RequestFailed("bad_logprob", "the server has no finite logprob for a token it sampled: its weights may hold NaN")
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_logprobs=np.array(values, dtype=np.float32),
        spans=_spans(choice.get("weight_versions"), len(output_ids), version),
        finish_reason=choice["finish_reason"],
    )


def _spans(weight_versions: list[dict[str, Any]] | None, length: int, version: int | None) -> list[VersionSpan]:
    """The server's version spans; everything is stamped with the `version` at dispatch if it has none.

    Raises:
        ServerError: it serves weights that are older than those it confirmed, or that nobody numbered: it was restarted.
    """
    if weight_versions is None or version is None:
        return [VersionSpan(0, length, version or 0)]
    for span in weight_versions:
        if not str(span["version"]).isdecimal() or int(span["version"]) < version:
            raise ServerError(
                f"the server answered with weights {span['version']!r} although it holds version {version}: it was restarted, "
                "or somebody else changed its weights"
            )
    spans = [VersionSpan(int(span["start"]), int(span["end"]), int(span["version"])) for span in weight_versions]
    bounds = [0, *(span.stop for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != length:
        raise RequestFailed("bad_answer", f"the server's version spans {weight_versions} do not cover {length} tokens")
    return spans
