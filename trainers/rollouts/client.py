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

import aiohttp
import numpy as np

from trainers.errors import ServerError
from trainers.rollouts.protocol import GENERATE, PLAIN, RequestFailed, Retryable, SamplingForm, read_answer, request_body
from trainers.types import TurnRecord

_UNREACHABLE_S = 30.0
_JSON = {"Content-Type": "application/json"}


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
        form: what every request asks for beside its own temperature, length and seed.
        unreachable_s: seconds without any answer to any request, connections failing, after which the server counts as gone.
    """

    def __init__(
        self,
        base_url: str,
        budget_s: float,
        on_retry: Callable[[str], None] = lambda cause: None,
        first_pause_s: float = 0.5,
        unreachable_s: float = _UNREACHABLE_S,
        form: SamplingForm = PLAIN,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.facts: ServerFacts | None = None
        self._budget_s = budget_s
        self._form = form
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
            except Retryable as error:
                self._last_error = str(error)
                self._look_for_death(error)
                attempt += 1
                left_s = deadline - time.monotonic()
                if left_s <= pause_s:
                    raise RequestFailed(error.cause, f"{error} (given up after {attempt} attempts)") from error
                self._on_retry(error.cause)
            await asyncio.sleep(pause_s * (0.75 + 0.5 * self._jitter.random()))
            pause_s = min(pause_s * 2, 10.0)

    def _look_for_death(self, error: Retryable) -> None:
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
        path, body = request_body(
            self._form,
            self.facts.generate,
            self.facts.model,
            prompt_ids,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            version=version,
        )
        timeout = aiohttp.ClientTimeout(total=max(timeout_s, 0.001))
        try:
            async with self._session.post(self.base_url + path, data=body, headers=_JSON, timeout=timeout) as response:
                if response.status >= 500:
                    raise Retryable(f"http_{response.status}", f"{path}: {response.status} {(await response.text())[:300]}")
                if response.status != 200:
                    raise RequestFailed(f"http_{response.status}", f"{path}: {response.status} {(await response.text())[:300]}")
                answer = await response.read()
        except TimeoutError as error:
            raise Retryable("timeout", f"{path}: no answer within {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Retryable("connection", f"{path}: {type(error).__name__}: {error}") from error
        return read_answer(answer, prompt_ids, version)
