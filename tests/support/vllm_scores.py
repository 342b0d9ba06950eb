"""Scoring answers as vLLM's own classes build them: `python -m tests.support.vllm_scores < cases.json > bodies.json`.

A process of its own, because importing the server takes long and changes logging and warnings.

A case: `form` ("generate" or "completions"), `tokens` that were scored, `scores` (for each but the first, one log-probability
per id of the vocabulary, null for −inf), `top` (what `prompt_logprobs` of the request says), `texts` of the vocabulary; or
`form` "chosen" with `values`, a row of numbers per position, null for −inf.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def _finite(row: list[float | None]) -> list[float]:
    return [float("-inf") if value is None else value for value in row]


def scored_body(case: dict[str, Any]) -> bytes:
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
    from vllm.entrypoints.scale_out.token_in_token_out import protocol
    from vllm.entrypoints.serve.engine.protocol import UsageInfo
    from vllm.logprobs import append_logprobs_for_next_position, create_prompt_logprobs

    given = create_prompt_logprobs(False)
    for token, row in zip(case["tokens"][1:], case["scores"], strict=True):
        scores = _finite(row)
        ids = [token, *sorted(range(len(scores)), key=lambda i: -scores[i])[: case["top"]]]
        texts = [case["texts"][i] if case["form"] == "completions" else None for i in ids]
        rank = sum(score >= scores[token] for score in scores)
        append_logprobs_for_next_position(given, ids, [scores[i] for i in ids], texts, rank, case["top"])
    scored: Any = clamp_prompt_logprobs(given)
    if case["form"] == "completions":
        choice = CompletionResponseChoice(index=0, text='"prompt_logprobs":[{"logprob":', prompt_logprobs=scored)
        answer: Any = CompletionResponse(model="teacher", choices=[choice], usage=UsageInfo())
    else:
        generated = protocol.GenerateTokensChoice(index=0, finish_reason="length", token_ids=[1])
        answer = protocol.GenerateTokensResponse(choices=[generated], prompt_logprobs=scored)
    return bytes(JSONResponse(answer.model_dump()).body)


def chosen_body(case: dict[str, Any]) -> bytes:
    import numpy as np
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.scale_out.token_in_token_out import protocol
    from vllm.utils.serial_utils import numpy2base64

    values = np.array([_finite(row) for row in case["values"]], np.float32)
    choice = protocol.GenerateTokensChoice(index=0, finish_reason="length", token_ids=[1])
    answer = protocol.GenerateTokensResponse(choices=[choice], prompt_token_id_logprobs=numpy2base64(values))
    return bytes(JSONResponse(answer.model_dump()).body)


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # the server's modules print
    bodies = [chosen_body(case) if case["form"] == "chosen" else scored_body(case) for case in json.load(sys.stdin)]
    json.dump([body.decode() for body in bodies], out)


if __name__ == "__main__":
    main()
