"""Log-probabilities of a `/inference/v1/generate` answer as arrays, where a request asks for them.

vLLM's Python front end makes an object, a dictionary and some JSON of every token and of every likely one beside it: for the
top 8 of 512 tokens, some 20 ms of Python that let nothing else through. A request that says
`"extra_args": {"loopwright_arrays": 1}, "flat_logprobs": true` gets, in place of `choices[].logprobs`,

    {"arrays": {"columns": K, "ids": BASE64, "logprobs": BASE64}}

int32 and float32 [tokens, K], little-endian: the sampled token first, then the likeliest ones, likeliest first. Of the sampled
token alone (K = 1) the ids are those of the answer and are left out.
"""

from __future__ import annotations

import base64
import functools
import sys
from typing import Any

import numpy as np

ASKED_BY = "loopwright_arrays"


def asks(request: Any) -> bool:
    params = request.sampling_params
    asked = (params.extra_args or {}).get(ASKED_BY)
    return bool(asked and params.flat_logprobs and params.logprobs is not None and params.logprobs >= 0)


def arrays_of(flat: Any, tokens: int) -> dict[str, Any] | None:
    """Of a `FlatLogprobs`; None where its positions have not the same number of entries."""
    columns = len(flat.logprobs) // max(tokens, 1)
    if len(flat.start_indices) != tokens or list(flat.start_indices) != list(range(0, columns * tokens, max(columns, 1))):
        return None
    told = {"columns": columns, "logprobs": _text(flat.logprobs, "<f4")}
    return {"arrays": told | ({"ids": _text(flat.token_ids, "<i4")} if columns > 1 else {})}


def _text(values: list[Any], kind: str) -> str:
    return base64.b64encode(np.array(values, kind).tobytes()).decode()


@functools.cache
def with_arrays(response_type: Any) -> Any:
    """The same type of answer, written with `arrays` in place of log-probabilities."""
    from pydantic import PrivateAttr

    class Answer(response_type):
        _arrays: list[Any] = PrivateAttr(default_factory=list)

        def model_dump(self, **options: Any) -> dict[str, Any]:
            answer = super().model_dump(**options)
            for choice, arrays in zip(answer["choices"], self._arrays, strict=True):
                choice["logprobs"] = arrays
            return answer

    return Answer


def wrap(serving: Any) -> None:
    """`serving`: vLLM's class that answers these requests."""
    whole_answer = serving.serve_tokens_full_generator

    @functools.wraps(whole_answer)
    async def answer(self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        if not asks(request):
            return await whole_answer(self, request, result_generator, *args, **kwargs)
        arrays: list[dict[str, Any] | None] = []

        async def outputs() -> Any:
            result = None
            async for result in result_generator:
                yield result
            for output in result.outputs if result is not None else ():
                arrays.append(arrays_of(output.logprobs, len(output.token_ids)))
            if None not in arrays:
                request.sampling_params.logprobs = None  # it is answered: vLLM writes none

        response = await whole_answer(self, request, outputs(), *args, **kwargs)
        if None in arrays or not hasattr(response, "choices"):
            return response
        kind = type(response)
        made = with_arrays(kind).model_construct(**{name: getattr(response, name) for name in kind.model_fields})
        made._arrays = arrays
        return made

    answer.arrays = True
    serving.serve_tokens_full_generator = answer


def install() -> None:
    """Into the front end of this process: of vLLM, once it is set up; there is none in the proxy's (proxy.py)."""
    module = sys.modules.get("vllm.entrypoints.scale_out.token_in_token_out.serving")
    serving = getattr(module, "ServingTokens", None)
    if hasattr(serving, "serve_tokens_full_generator") and not hasattr(serving.serve_tokens_full_generator, "arrays"):
        wrap(serving)
