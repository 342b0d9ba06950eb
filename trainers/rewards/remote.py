"""A reward model behind HTTP.

    conversation ─▶ POST (at most `max_concurrency` at once) ─▶ score      5xx, 429, a cut connection: again, until `timeout_s`

`vllm-classify` and `vllm-pooling` are vLLM's endpoints of a model served as a classifier or reward model, one conversation a
request; `json` is a protocol for a service of one's own, one group a request.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainers.errors import ConfigError, ServerError
from trainers.rewards.text import text_of

if TYPE_CHECKING:
    import aiohttp

_PATHS = {"vllm-classify": "/classify", "vllm-pooling": "/pooling", "json": ""}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


class RewardModel:
    """An asynchronous reward function. It can be pickled; its connections belong to the event loop on which it is called.

    Args:
        url: of the server (`http://host:8000`); with `json` the whole address to post to.
        model: the served model's name; not needed by `json`.
        api: `vllm-classify`: POST /classify, the score is `probs[label]`; `vllm-pooling`: POST /pooling, entry `label` of the
            last vector; `json`: {"prompts", "completions", "columns"} → {"rewards": [number or null, …]}.
        label: which class or entry is the reward; −1, the last, is the only one of a model with one.
        activation: let the server apply its sigmoid or softmax; default its raw value.
        template: text to score with `{prompt}` (the last prompt message) and `{completion}` (what the model wrote, all turns);
            None: send the messages, which the server renders by its own chat template.
        timeout_s: most seconds for one answer, all attempts together.
        max_concurrency: most requests at once.
        key_env: name of the environment variable with the bearer token; None: send none.
        name: of the metric.

    Raises:
        ConfigError: an argument has no meaning, or `key_env` is not set.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api: Literal["vllm-classify", "vllm-pooling", "json"] = "vllm-classify",
        label: int = -1,
        activation: bool = False,
        template: str | None = None,
        timeout_s: float = 60.0,
        max_concurrency: int = 32,
        key_env: str | None = None,
        name: str = "reward_model",
    ) -> None:
        if api not in _PATHS:
            raise ConfigError(f"RewardModel: api is {api!r}; write one of {', '.join(_PATHS)}")
        if api != "json" and not model:
            raise ConfigError(f"RewardModel: {api} needs `model`, the name under which the server has it")
        if key_env is not None and not os.environ.get(key_env):
            raise ConfigError(f"RewardModel: the environment variable {key_env} is not set, which key_env names")
        self.__name__ = name
        self.url, self.model, self.api = url.rstrip("/") + _PATHS[api], model, api
        self.label, self.activation = label, activation
        self.template, self.timeout_s, self.max_concurrency, self.key_env = template, timeout_s, max_concurrency, key_env
        self._open: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession, asyncio.Semaphore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion.

        Raises:
            ServerError: the server refused, or gave no answer in time, or one that is not a score.
        """
        if self.api == "json":
            columns.pop("completion_ids", None)
            body = {"prompts": list(prompts), "completions": list(completions), "columns": columns}
            answer = await self._post(body)
            return self._read(lambda: _same_length(answer["rewards"], completions), answer)
        return list(await asyncio.gather(*(self._score(*pair) for pair in zip(prompts, completions, strict=True))))

    async def aclose(self) -> None:
        if self._open is not None:
            await self._open[1].close()
            self._open = None

    async def _score(self, prompt: Any, completion: Any) -> float:
        body: dict[str, Any] = {"model": self.model, "use_activation": self.activation}
        messages = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
        if self.template is None:
            body["messages"] = messages
        else:
            asked = str(_messages(prompt, "user")[-1].get("content") or "")
            body["input"] = self.template.replace("{prompt}", asked).replace("{completion}", text_of(completion))
        answer = await self._post(body)
        if self.api == "vllm-classify":
            return self._read(lambda: float(answer["data"][0]["probs"][self.label]), answer)
        return self._read(lambda: float(_last_vector(answer["data"][0]["data"])[self.label]), answer)

    def _read(self, take: Any, answer: Any) -> Any:
        try:
            return take()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url} answered what is no {self.api} answer ({type(error).__name__}: {error}): {answer!r:.300}"
            ) from error

    async def _post(self, body: dict[str, Any]) -> Any:
        import aiohttp

        session, slots = self._session()
        deadline, pause_s, trouble = time.monotonic() + self.timeout_s, _FIRST_PAUSE_S, "no free connection"
        async with slots:
            while (left := deadline - time.monotonic()) > 0:
                try:
                    async with session.post(self.url, json=body, timeout=aiohttp.ClientTimeout(total=left)) as response:
                        if response.status == 200:
                            return await response.json(content_type=None)
                        trouble = f"{response.status} {(await response.text())[:300]}"
                        if response.status < 500 and response.status != 429:
                            raise ServerError(f"{self.url} refused: {trouble}")
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    trouble = f"{type(error).__name__}: {error}"
                await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise ServerError(f"{self.url} gave no answer within {self.timeout_s:g} s (timeout_s); the last attempt: {trouble}")

    def _session(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            headers = {"Authorization": f"Bearer {os.environ.get(self.key_env, '')}"} if self.key_env else {}
            connector = aiohttp.TCPConnector(limit=self.max_concurrency)
            session = aiohttp.ClientSession(headers=headers, connector=connector)
            self._open = (loop, session, asyncio.Semaphore(self.max_concurrency))
        return self._open[1], self._open[2]


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _same_length(rewards: Any, completions: Sequence[Any]) -> list[float | None]:
    if len(rewards) != len(completions):
        raise ValueError(f"{len(rewards)} rewards for {len(completions)} completions")
    return [None if reward is None else float(reward) for reward in rewards]


def _last_vector(data: Any) -> list[float]:
    """Of one vector, or of a vector per token."""
    return data[-1] if isinstance(data[0], list) else data
