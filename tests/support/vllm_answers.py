"""Answers as vLLM's own classes build and serialise them: `python -m tests.support.vllm_answers < cases.json > bodies.json`.

A process of its own, because importing the server takes long and changes logging and warnings.

A case: `endpoint` ("generate", "arrays" by the plugin's front end, or "completions"), `sampled` ids, `scores` (per token, one
log-probability per id of the vocabulary, null for −inf), `top` (what `logprobs` of the request says), `flat` (how the engine
keeps them), `mask` (candidate ids per token, or null).
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any


def engine_logprobs(case: dict[str, Any], container: Any) -> Any:
    """What the engine hands to the front end: per position the sampled token first, then the `top` likeliest."""
    from vllm.logprobs import append_logprobs_for_next_position

    for sampled, row in zip(case["sampled"], case["scores"], strict=True):
        scores = [float("-inf") if score is None else score for score in row]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: case["top"]]
        rank = sum(score >= scores[sampled] for score in scores)
        ids = [sampled, *best]
        append_logprobs_for_next_position(container, ids, [scores[i] for i in ids], [None] * len(ids), rank, case["top"])
    return container


def generate_body(case: dict[str, Any], container: Any) -> bytes:
    import numpy as np
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.scale_out.token_in_token_out import protocol
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.outputs import SamplingMask, WeightVersionSpan
    from vllm.v1.outputs import SamplingMaskLists

    sampled = case["sampled"]
    logprobs = ServingTokens._create_tokens_logprobs(None, sampled, engine_logprobs(case, container), case["top"])  # type: ignore[arg-type]
    mask = None
    if case["mask"] is not None:
        ids = np.array([i for ids in case["mask"] for i in ids], np.int32)
        offsets = np.cumsum([0, *(len(ids) for ids in case["mask"])])
        mask = SamplingMask(SamplingMaskLists(ids, offsets).to_nested_list()).token_ids
    choice = protocol.GenerateTokensChoice(
        index=0,
        logprobs=logprobs,
        finish_reason="length",
        token_ids=sampled,
        sampling_mask=mask,
        weight_versions=[WeightVersionSpan(version="3", start=0, end=len(sampled))],
    )
    return bytes(JSONResponse(protocol.GenerateTokensResponse(choices=[choice]).model_dump()).body)


def arrays_body(case: dict[str, Any], container: Any) -> bytes:
    """By vLLM's own method, as the plugin wraps it."""
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
    from vllm.sampling_params import SamplingParams

    from infra.vllm import PLUGIN

    sys.path.insert(0, str(PLUGIN))
    from loopwright_vllm import arrays

    arrays.install()
    sampled = case["sampled"]
    logprobs = engine_logprobs(case, container)
    output = CompletionOutput(
        index=0, text="", token_ids=sampled, cumulative_logprob=None, logprobs=logprobs, finish_reason="length"
    )
    output.weight_versions = [WeightVersionSpan(version="3", start=0, end=len(sampled))]
    result = RequestOutput("x", prompt=None, prompt_token_ids=[5, 9], prompt_logprobs=None, outputs=[output], finished=True)

    async def results() -> Any:
        yield result

    params = SamplingParams(logprobs=case["top"], flat_logprobs=case["flat"], extra_args={arrays.ASKED_BY: 1})
    request = SimpleNamespace(
        sampling_params=params, output_mode="tokens", return_token_ids=False, _response_mm_placeholders=None
    )
    serving = object.__new__(ServingTokens)
    serving.enable_prompt_tokens_details = serving.enable_log_outputs = False
    answer = asyncio.run(serving.serve_tokens_full_generator(request, results(), "x", "policy", SimpleNamespace()))  # type: ignore[arg-type]
    return bytes(JSONResponse(answer.model_dump()).body)  # type: ignore[union-attr]


def completions_body(case: dict[str, Any], container: Any) -> bytes:
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Serving
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    logprobs = Serving._create_completion_logprobs(
        Serving,  # type: ignore[arg-type]
        case["sampled"],
        engine_logprobs(case, container),
        case["top"],
        None,
        return_as_token_id=True,
    )
    choice = CompletionResponseChoice(index=0, text="", logprobs=logprobs, finish_reason="length", token_ids=case["sampled"])
    response = CompletionResponse(model="policy", choices=[choice], usage=UsageInfo())
    return bytes(JSONResponse(response.model_dump()).body)


BODIES = {"generate": generate_body, "arrays": arrays_body, "completions": completions_body}


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # the server's modules print
    from vllm.logprobs import FlatLogprobs

    bodies = [BODIES[case["endpoint"]](case, FlatLogprobs() if case["flat"] else []) for case in json.load(sys.stdin)]
    json.dump([body.decode() for body in bodies], out)


if __name__ == "__main__":
    main()
