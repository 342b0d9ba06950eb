"""Generation requests to one vLLM server: token ids in, token ids and sampled logprobs out.

`/inference/v1/generate` where the server has it (it says which policy version sampled which tokens), else `/v1/completions`,
stamped with the version known at dispatch. Retries live here and nowhere else: connection errors, timeouts and 5xx are tried
again with growing pauses until the request's one time budget is spent; a 4xx is final.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from trainers.errors import ServerError
from trainers.types import TurnRecord, VersionSpan

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
_UNREACHABLE_S = 30.0
_NO_LOGPROB = -9999.0  # how vLLM writes −inf and NaN


class RequestFailed(Exception):
    """A request was given up. `cause` is short and countable (`http_400`, `timeout`, …); the message has the details."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class _Retryable(Exception):
    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the engine must know of a server."""

    model: str
    max_model_len: int
    generate: bool  # has `/inference/v1/generate`


class GenerateClient:
    """Keep-alive connections to one server.

    Args:
        base_url: of the server, without `/v1`.
        budget_s: seconds a request may take, all its attempts and pauses together.
        on_retry: called once for every request that is sent again, with its cause.
        unreachable_s: seconds without any answer to any request, connections failing, after which the server counts as gone.
    """

    def __init__(
        self,
        base_url: str,
        budget_s: float,
        on_retry: Callable[[str], None] = lambda cause: None,
        first_pause_s: float = 0.5,
        unreachable_s: float = _UNREACHABLE_S,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.facts: ServerFacts | None = None
        self._budget_s = budget_s
        self._on_retry = on_retry
        self._first_pause_s = first_pause_s
        self._unreachable_s = unreachable_s
        self._unreachable_since: float | None = None
        self._session: aiohttp.ClientSession | None = None
        self._jitter = random.Random(0)
        self._last_error: str | None = None

    async def open(self, wait_s: float) -> ServerFacts:
        """Connect and look at the server, waiting up to `wait_s` for it to answer.

        Raises:
            ServerError: it does not answer, or refuses the key.
        """
        key = os.environ.get("VLLM_API_KEY")
        self._session = aiohttp.ClientSession(
            # The server closes idle connections after 5 s; one reused at that moment would be reset.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self.facts = await self._look()
                return self.facts
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ServerError(f"no answer from {self.base_url} for {wait_s:.0f} s: {error!r}") from error
                await asyncio.sleep(1)

    async def _look(self) -> ServerFacts:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=30)
        async with self._session.get(self.base_url + "/v1/models", timeout=timeout) as response:
            if response.status in (401, 403):
                raise ServerError(f"{self.base_url} refuses the key in VLLM_API_KEY ({response.status})")
            if response.status != 200:
                raise ServerError(f"{self.base_url}/v1/models answered {response.status}: {(await response.text())[:300]}")
            model = (await response.json())["data"][0]
        # An empty request is refused where the endpoint exists, and not found where it does not.
        async with self._session.post(self.base_url + GENERATE, json={}, timeout=timeout) as response:
            generate = response.status not in (404, 405)
        return ServerFacts(model["id"], int(model["max_model_len"]), generate)

    @property
    def trouble(self) -> str:
        """The newest error, if no request has succeeded since; for messages."""
        return f" (last error: {self._last_error})" if self._last_error else ""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def turn(
        self, prompt_ids: np.ndarray, *, temperature: float, max_tokens: int, seed: int, version: Callable[[], int | None]
    ) -> TurnRecord:
        """Generate one turn. `version` gives the policy version the servers hold now; it is asked at every attempt.
        None: whatever weights the server holds, under version 0 (evaluation).

        Raises:
            RequestFailed: refused, or out of budget.
            ServerError: the server no longer holds the weights it was given.
        """
        assert self.facts is not None, "open() comes first"
        deadline = time.monotonic() + self._budget_s
        pause_s, attempt = self._first_pause_s, 0
        while True:
            try:
                timeout_s = deadline - time.monotonic()
                turn = await self._attempt(prompt_ids, temperature, max_tokens, seed, version(), timeout_s)
                self._last_error = self._unreachable_since = None
                return turn
            except _Retryable as error:
                self._last_error = str(error)
                self._look_for_death(error)
                attempt += 1
                left_s = deadline - time.monotonic()
                if left_s <= pause_s:
                    raise RequestFailed(error.cause, f"{error} (given up after {attempt} attempts)") from error
                self._on_retry(error.cause)
            await asyncio.sleep(pause_s * (0.75 + 0.5 * self._jitter.random()))
            pause_s = min(pause_s * 2, 10.0)

    def _look_for_death(self, error: _Retryable) -> None:
        """Raises `ServerError` if nothing but failed connections has been seen for too long."""
        if error.cause != "connection":
            self._unreachable_since = None
            return
        now = time.monotonic()
        self._unreachable_since = self._unreachable_since or now
        if now - self._unreachable_since > self._unreachable_s:
            raise ServerError(f"{self.base_url} has been unreachable for {now - self._unreachable_since:.0f} s: {error}")

    async def _attempt(
        self, prompt_ids: np.ndarray, temperature: float, max_tokens: int, seed: int, version: int | None, timeout_s: float
    ) -> TurnRecord:
        assert self._session is not None and self.facts is not None
        # Neutral values are said, because the server would otherwise take those of the model's generation config.
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": max_tokens,
            "seed": seed,
            "logprobs": 0,  # the sampled token's alone
        }
        # Cached prefixes are only shared within one policy version.
        body: dict[str, Any] = {"model": self.facts.model, "cache_salt": str(version)}
        if self.facts.generate:
            path = GENERATE
            body |= {"token_ids": prompt_ids.tolist(), "sampling_params": {**sampling, "detokenize": False}}
        else:
            path = COMPLETIONS
            body |= {"prompt": prompt_ids.tolist(), "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}
        timeout = aiohttp.ClientTimeout(total=max(timeout_s, 0.001))
        try:
            async with self._session.post(self.base_url + path, json=body, timeout=timeout) as response:
                if response.status >= 500:
                    raise _Retryable(f"http_{response.status}", f"{path}: {response.status} {(await response.text())[:300]}")
                if response.status != 200:
                    raise RequestFailed(f"http_{response.status}", f"{path}: {response.status} {(await response.text())[:300]}")
                answer = await response.json()
        except TimeoutError as error:
            raise _Retryable("timeout", f"{path}: no answer within {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Retryable("connection", f"{path}: {type(error).__name__}: {error}") from error
        return _parse(answer["choices"][0], prompt_ids, version)


def _parse(choice: dict[str, Any], prompt_ids: np.ndarray, version: int | None) -> TurnRecord:
    """One choice of either endpoint."""
    if choice["finish_reason"] not in ("stop", "length"):
        raise _Retryable("aborted", f"the server ended the request with {choice['finish_reason']!r}")
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
