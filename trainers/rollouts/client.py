"""Connections to one vLLM server: single tries of generation requests, and looks at its state.

    ServerPool ─▶ GenerateClient.attempt ─▶ request bytes ══▶ server ══▶ answer bytes ─▶ TurnRecord
                                                 (`protocol` knows the bodies)

`/inference/v1/generate` where the server has it, else `/v1/completions`. Nothing is retried and no try is bounded in time
here: both are the pool's, which knows the request's budget and the other servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainers.adapters import is_later, version_of
from trainers.errors import ServerCapabilityError, ServerError
from trainers.rollouts.answers import read_answer
from trainers.rollouts.http import ConnectFailed, HttpClient
from trainers.rollouts.protocol import GENERATE, PLAIN, RequestFailed, Retryable, SamplingForm, refusal, request_body
from trainers.rollouts.server_load import ServerLoad, parse_load
from trainers.types import TurnRecord

CONNECT_S = 10.0
LOOK_S = 10.0  # for the server to answer about itself
NONSENSE = (LookupError, TypeError, ValueError)  # reading the answer of another program, at the address of a server that ended


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the engine must know of a server."""

    model: str
    max_model_len: int
    generate: bool  # has `/inference/v1/generate`
    load: ServerLoad | None  # None: it has no `/metrics`
    root: str | None = None  # what it was started with: a folder of its machine, or a hub id


class GenerateClient:
    """Keep-alive connections to one server.

    Args:
        base_url: of the server, without `/v1`.
        form: what every request asks for beside its own temperature, length and seed.
        keys: names of environment variables; the first that is set holds the server's key; empty: it has none.
    """

    def __init__(self, base_url: str, form: SamplingForm = PLAIN, keys: Sequence[str] = ("VLLM_API_KEY",)) -> None:
        self.base_url = base_url.rstrip("/")
        self.facts: ServerFacts | None = None
        self._form, self._keys = form, keys
        self._http: HttpClient | None = None

    async def open(self, wait_s: float) -> ServerFacts:
        """Connect and look at the server, waiting up to `wait_s` for it to answer.

        Raises:
            ServerError: it does not answer, or refuses the key.
        """
        key = next((os.environ[name].strip() for name in self._keys if name in os.environ), None) or None
        self._http = HttpClient(self.base_url, key, CONNECT_S)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                async with asyncio.timeout(3 * LOOK_S):
                    self.facts = await self._look()
                return self.facts
            except (ConnectionError, TimeoutError, *NONSENSE) as error:
                if time.monotonic() > deadline:
                    why = f"{type(error).__name__}: {error}"
                    what = "no vLLM server's answer" if isinstance(error, NONSENSE) else "no answer"
                    raise ServerError(f"{what} from {self.base_url} for {wait_s:.0f} s: {why}") from error
                await asyncio.sleep(1)

    async def close(self) -> None:
        if self._http is not None:
            self._http.close()

    async def attempt(
        self,
        prompt_ids: np.ndarray,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        version: int | None,
        adapter: str | None = None,
    ) -> TurnRecord:
        """One try of one turn. `version`: the policy version the server must hold; None: whatever weights it has. `adapter`:
        the one that is this version; None: the served model itself is.

        Raises:
            Retryable: another try may succeed. `connection`: none could be made; `reset`: it broke; `http_5…`; `bad_json`.
            RequestFailed: the server refuses the request.
            ServerCapabilityError: the server refuses what every request of the run asks for.
            ServerError: the server no longer holds the weights it was given.
        """
        assert self.facts is not None, "open() comes first"
        path, body = request_body(
            self._form,
            self.facts.generate,
            adapter or self.facts.model,
            prompt_ids,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            version=version,
        )
        status, answer = await self.post(path, body)
        if status != 200:
            message = answer[:300].decode(errors="replace")
            if status == 400 and (remedy := refusal(self._form, message)):
                raise ServerCapabilityError(f"the server at {self.base_url} cannot do what this run needs: {remedy}")
            if status == 404 and adapter is not None:
                raise await self._gone(adapter)
            raise self.refused(path, status, message)
        return read_answer(self._form, answer, prompt_ids, version, by_adapter=adapter is not None)

    async def _gone(self, adapter: str) -> Exception:
        """What it means that an adapter is not there."""
        try:
            names = await self._adapters()
        except (ConnectionError, TimeoutError, *NONSENSE) as error:
            return Retryable("reset", f"{self.base_url}: {type(error).__name__}: {error}")
        if any(is_later(name, adapter) for name in names):
            return RequestFailed("stale", f"{self.base_url} has let go of {adapter}: its version left the window")
        return ServerError(f"the server no longer has the adapter {adapter} that it confirmed: it was restarted")

    async def _adapters(self) -> list[str]:
        status, page = await self._get("/v1/models")
        return [str(model["id"]) for model in json.loads(page)["data"]] if status == 200 else []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `Retryable` if there is none."""
        try:
            return await self.request("POST", path, body)
        except ConnectFailed as error:
            raise Retryable("connection", f"{self.base_url}{path}: {error}") from error
        except ConnectionError as error:
            raise Retryable("reset", f"{self.base_url}{path}: {type(error).__name__}: {error}") from error

    def refused(self, path: str, status: int, message: str) -> Exception:
        """What an answer of another status than 200 means."""
        return (Retryable if status >= 500 else RequestFailed)(f"http_{status}", f"{self.base_url}{path}: {status} {message}")

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer. Raises `ConnectFailed`, `BrokenAnswer`."""
        assert self._http is not None, "open() comes first"
        return await self._http.request(method, path, body)

    # Looks at the server; an error of the connection is the caller's to catch

    async def load(self) -> ServerLoad | None:
        """What `/metrics` says now; None where there is none."""
        status, page = await self._get("/metrics")
        return parse_load(page.decode(errors="replace")) if status == 200 else None

    async def healthy(self) -> bool:
        status, _ = await self._get("/health")
        return status < 500

    async def weight_version(self, adapter: str | None = None) -> str | None:
        """The number of the weights it serves ("default" on a fresh server); None where it does not tell. With `adapter`: of
        that one, if it is loaded."""
        if adapter is not None:
            return str(version_of(adapter)) if adapter in await self._adapters() else "default"
        status, page = await self._get("/weight_info")
        return str(json.loads(page)["weight_version"]) if status == 200 else None

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with asyncio.timeout(LOOK_S):
            return await self.request("GET", path)

    async def _look(self) -> ServerFacts:
        status, page = await self.request("GET", "/v1/models")
        if status in (401, 403):
            raise ServerError(f"{self.base_url} refuses the key in {' or '.join(self._keys)} ({status})")
        if status != 200:
            raise ServerError(f"{self.base_url}/v1/models answered {status}: {page[:300].decode(errors='replace')}")
        model = json.loads(page)["data"][0]
        # An empty request is refused where the endpoint exists, and not found where it does not.
        status, _ = await self.request("POST", GENERATE, b"{}")
        generate = status not in (404, 405)
        return ServerFacts(model["id"], int(model["max_model_len"]), generate, await self.load(), model.get("root"))
