"""A teacher without a model: vLLM's scoring forms over a table of log-probabilities by (previous token, token)."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
from aiohttp import web

from tests.support.stub_server import StubServer

VOCABULARY = 300


def logprob_table(seed: int, temperature: float = 1.0, vocabulary: int = VOCABULARY) -> np.ndarray:
    """float64 [V, V]: row t is the distribution after token t."""
    logits = np.random.default_rng(seed).normal(size=(vocabulary, vocabulary)) * 3 / temperature
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


class StubTeacher(StubServer):
    """Scores by `logprob_table(seed, temperature)`. Faults as `StubServer`'s, for scoring requests, the probes among them.

    Args:
        applies_temperature: false: as vLLM does by itself, whatever temperature a request has.
        by_text: names tokens of `prompt_logprobs` by their text.
        chosen: scores chosen ids; needs `generate`.
        max_logprobs: most that may be asked for.
        lists: most that it names at a position, however many are asked for.
        vocabulary: text of the ids that /detokenize knows; None: there is no such endpoint.
        root: what /v1/models says it was started with.
        size: of the table.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        max_model_len: int = 65,
        generate: bool = True,
        applies_temperature: bool = True,
        by_text: bool = False,
        chosen: bool = False,
        max_logprobs: int = VOCABULARY,
        lists: int = VOCABULARY,
        vocabulary: dict[int, str] | None = None,
        root: str | None = None,
        size: int = VOCABULARY,
    ) -> None:
        super().__init__(max_model_len=max_model_len, generate=generate)
        self._seed, self._applies_temperature, self._by_text = seed, applies_temperature, by_text
        self._chosen, self._max_logprobs, self._vocabulary, self._root = chosen, max_logprobs, vocabulary, root
        self._size, self._lists = size, lists
        self.scored: list[list[int]] = []  # sequences, probes included
        self.keys: set[str | None] = set()  # headers `Authorization` of scoring requests
        self.at_once = self.most_at_once = 0
        self.says_nothing_of: set[int] = set()  # positions

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/version", self._version)
        if self._vocabulary is not None:
            app.router.add_post("/detokenize", self._detokenize)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "teacher", "max_model_len": self._max_model_len, "root": self._root}
        return web.json_response({"data": [model]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _detokenize(self, request: web.Request) -> web.Response:
        assert self._vocabulary is not None
        tokens = (await request.json())["tokens"]
        return web.json_response({"prompt": "".join(self._vocabulary.get(token, "") for token in tokens)})

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await super()._answer(request)
        finally:
            self.at_once -= 1

    def _body(self, request: web.Request, body: dict[str, Any], fault: int | str | None) -> web.Response:
        sampling = body.get("sampling_params", body)
        tokens = body["token_ids"] if "token_ids" in body else body["prompt"]
        assert sampling["max_tokens"] == 1, sampling
        assert len(tokens) < self._max_model_len, (len(tokens), self._max_model_len)
        self.scored.append(tokens)
        table = logprob_table(self._seed, sampling["temperature"] if self._applies_temperature else 1.0, self._size)
        answer: dict[str, Any] = {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "length", "logprobs": None}]}
        if (rows := sampling.get("prompt_logprob_token_ids")) is not None:
            if not self._chosen:
                return _refused("prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).")
            answer["prompt_token_id_logprobs"] = _binary(table, tokens, rows, sampling["prompt_logprob_start"])
            return web.json_response(answer)
        top_k = sampling["prompt_logprobs"]
        if top_k > self._max_logprobs:
            return _refused(f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {self._max_logprobs}")
        scored = [None, *(self._position(table, tokens, at, min(top_k, self._lists)) for at in range(1, len(tokens)))]
        holder = answer if "token_ids" in body else answer["choices"][0]
        holder["prompt_logprobs"] = scored
        return web.Response(body=json.dumps(answer, separators=(",", ":")), content_type="application/json")

    def _position(self, table: np.ndarray, tokens: list[int], at: int, top_k: int) -> dict[str, Any] | None:
        """The realised token first, then the likeliest, as vLLM lists them."""
        if at in self.says_nothing_of:
            return None
        row = table[tokens[at - 1]]
        likeliest = np.argsort(-row)[:top_k].tolist()
        ranks = {tokens[at]: int((row > row[tokens[at]]).sum()) + 1} | {token: i + 1 for i, token in enumerate(likeliest)}
        return {
            f"<{token}>" if self._by_text else str(token): {
                "logprob": float(np.float32(row[token])),
                "rank": rank,
                "decoded_token": f'}}}},{{"{token}":',
            }
            for token, rank in ranks.items()
        }


def _binary(table: np.ndarray, tokens: list[int], rows: list[list[int]], start: int) -> str:
    ids = np.array(rows)
    assert len(ids) == len(tokens) - 1 - start, (len(ids), len(tokens), start)
    values = table[np.array(tokens)[start:-1, None], np.maximum(ids, 0)]
    with io.BytesIO() as buffer:
        np.save(buffer, np.where(ids < 0, -np.inf, values).astype(np.float32))
        return base64.b64encode(buffer.getvalue()).decode()


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)
