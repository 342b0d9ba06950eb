"""A student and a teacher that answer at once, in one process: `/v1/completions`, the teacher's under `/teacher`.

    python -m benchmarks.stub_teacher ANSWERS.json       prints its port; ends with SIGTERM

    student: prompt ids ─▶ one of the completions, always the same for the same prompt
    teacher: sequence ids ─▶ the body vLLM would send for prompt_logprobs, made once and kept

ANSWERS.json: `completions` (complete bodies of the student), `max_model_len`, `model`, `vocabulary` (its size), `top_k`.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.stub_vllm import ECHO, response, serve


class TeacherScript:
    """What both answer."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._completions = [tuple(body.encode().split(ECHO)) for body in answers["completions"]]
        self._vocabulary, self._top_k = answers["vocabulary"], answers["top_k"]
        self._scores: dict[bytes, bytes] = {}
        longest = answers["max_model_len"]
        self._pages = {b"GET /health": response(b"")}
        for path, most in ((b"", longest), (b"/teacher", longest + 1)):
            model = {"id": answers["model"], "object": "model", "max_model_len": most}
            self._pages[b"GET " + path + b"/v1/models"] = response(json.dumps({"object": "list", "data": [model]}).encode())
        self._missing = response(b'{"detail":"Not Found"}', "404 Not Found")

    def answer(self, request: bytes, body: bytes) -> bytes:
        """The answer to a request of this first line and body."""
        if request.startswith(b"POST /v1/completions"):
            ids = _ids(body)
            head, tail = self._completions[zlib.crc32(ids) % len(self._completions)]
            return response(head + ECHO + ids + tail)
        if request.startswith(b"POST /teacher/v1/completions"):
            ids = _ids(body)
            if ids not in self._scores:
                self._scores[ids] = response(self._scored(ids))
            return self._scores[ids]
        return self._pages.get(b" ".join(request.split(b" ", 2)[:2]), self._missing)

    def _scored(self, ids: bytes) -> bytes:
        """Every position's realised token first and then the likeliest, as vLLM's Python front end writes them."""
        tokens = json.loads(b"[" + ids + b"]")
        rng = np.random.default_rng(zlib.crc32(ids))
        scored: list[Any] = [None]
        for token in tokens[1:]:
            others = rng.choice(self._vocabulary, self._top_k, replace=False).tolist()
            shares = np.sort(rng.dirichlet(np.full(self._top_k + 2, 0.5)) + 1e-6)[::-1] / 1.001  # the last is all the rest
            *tops, realised, _ = np.log(shares).astype(np.float32).astype(float).tolist()
            entries = {token: {"logprob": realised, "rank": self._top_k + 1, "decoded_token": " word"}}
            for rank, (other, logprob) in enumerate(zip(others, tops, strict=True), start=1):
                entries[other] = {"logprob": logprob, "rank": rank, "decoded_token": " word"}
            scored.append(entries)
        choice = {"index": 0, "text": " w", "logprobs": None, "finish_reason": "length", "prompt_logprobs": scored}
        usage = {"prompt_tokens": len(tokens), "total_tokens": len(tokens) + 1, "completion_tokens": 1}
        answer = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "teacher", "choices": [choice]}
        return json.dumps(answer | {"usage": usage}, separators=(",", ":")).encode()


def _ids(body: bytes) -> bytes:
    begin = body.index(b"[", body.index(b'"prompt"')) + 1
    return body[begin : body.index(b"]", begin)].replace(b" ", b"")


if __name__ == "__main__":
    uvloop.run(serve(TeacherScript(json.loads(Path(sys.argv[1]).read_text()))))
