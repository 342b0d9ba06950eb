"""Environments: one object per rollout, whose public methods are tools.

    factory() ─▶ reset(**row) ─▶ observation, appended to the prompt ─▶ conversation ─▶ get_reward() ─▶ close()

Invariants:
- an object serves one rollout and is closed once, whether the rollout ends, fails or is cancelled, with the run at the latest;
- all its methods run in `SideCalls`, so that they may block: one after another, but for a `close` when one was given up.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from trainers.errors import ConfigError
from trainers.metrics import MetricBag, sanitize
from trainers.rollouts.protocol import RequestFailed
from trainers.rollouts.side_calls import SideCalls
from trainers.rollouts.tools import Tool, make_tool
from trainers.types import Message, Prompt

logger = logging.getLogger(__name__)

_NOT_TOOLS = ("reset", "get_reward", "close")
_CLOSE_LIMIT_S = 10.0
_SHOWN_CHARS = 200  # of an observation that is refused


@dataclass(frozen=True, slots=True)
class Episode:
    """An environment that was reset for a rollout."""

    environment: Any
    observation: Any  # None: nothing to add to the prompt


def tool_names(kind: type) -> list[str]:
    """The methods of an environment's class that the model may call. Raises `ConfigError` if it has no `reset`."""
    # Looked up on the class: asking the object would run its properties.
    public = [name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")]
    if "reset" not in public:
        raise ConfigError(
            f"environment {kind.__name__} has no method `reset`: write `def reset(self, **row)`, which prepares it for a "
            "dataset row and returns what the model is shown first, or None"
        )
    return [name for name in public if name not in _NOT_TOOLS]


def class_tools(kind: type) -> list[Tool]:
    """The tools that environments of this class would have, none being made. Raises `ConfigError` as `make_tool` does."""
    methods = []
    for name in tool_names(kind):
        bound = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        method = getattr(kind, name)
        methods.append(method if bound else MethodType(method, object()))  # as of an instance: without `self`
    return [make_tool(method, of_environment=True) for method in methods]


class Environments:
    """Makes, resets, scores and closes environments.

    Args:
        factory: called without arguments, gives an environment.
        metrics: where `env/…` goes.
    """

    def __init__(self, factory: Callable[[], Any], side: SideCalls, metrics: MetricBag) -> None:
        self._factory, self._side, self._metrics = factory, side, metrics
        self._open: dict[int, Any] = {}  # by id: made, and not yet closed
        self._example: Any = None
        self._methods: list[str] = []
        self._reset_takes: set[str] | None = None  # None: any column
        self._ended = self._told = False
        self.reward_name: str | None = None  # None: it has no `get_reward`

    async def look(self) -> None:
        """Make an environment and see what its class has; `looked` when `tools` were taken.

        Raises:
            ConfigError: it cannot be made, or has no `reset`.
        """
        try:
            environment = await self._make()
        except Exception as error:
            raise ConfigError(f"environment_factory() failed: {type(error).__name__}: {error}") from error
        self._example = environment
        kind = type(environment)
        self._methods = tool_names(kind)
        self.reward_name = sanitize(kind.__name__) if hasattr(kind, "get_reward") else None
        parameters = inspect.signature(environment.reset).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            self._reset_takes = {parameter.name for parameter in parameters}

    def tools(self) -> list[Tool]:
        """The methods the model may call. Raises `ConfigError` as `make_tool` does."""
        return [make_tool(getattr(self._example, name), of_environment=True) for name in self._methods]

    async def looked(self) -> None:
        """Close the environment that was looked at."""
        if self._example is not None:
            await self._close(self._example)

    @asynccontextmanager
    async def episode(self, row: Mapping[str, Any]) -> AsyncIterator[Episode]:
        """An environment reset for a dataset row; closed at the end.

        Raises:
            RequestFailed: it could not be made or reset.
        """
        environment = None
        try:
            began = time.monotonic()
            try:
                environment = await self._make()
                columns = row if self._reset_takes is None else {k: v for k, v in row.items() if k in self._reset_takes}
                observation = await self._side.call(environment.reset, **columns)
            except Exception as error:
                raise RequestFailed("environment", f"reset: {type(error).__name__}: {error}") from error
            self._metrics.add("env/reset_s", time.monotonic() - began)
            yield Episode(environment, observation)
        finally:
            if environment is not None:
                await self._close(environment)

    async def reward(self, environment: Any) -> float | None:
        """What `get_reward` says of the finished conversation; None: not applicable.

        Raises:
            RequestFailed: it failed, or gave no finite number.
        """
        began = time.monotonic()
        try:
            value = await self._side.call(environment.get_reward)
            value = None if value is None else float(value)
        except Exception as error:
            raise RequestFailed("environment", f"get_reward: {type(error).__name__}: {error}") from error
        self._metrics.add("env/reward_s", time.monotonic() - began)
        if value is not None and not math.isfinite(value):
            raise RequestFailed("reward", f"{self.reward_name} returned {value}")
        return value

    async def _make(self) -> Any:
        def make() -> Any:  # in a thread, for a rollout that may have been cancelled when it is done
            environment = self._factory()
            if not inspect.iscoroutine(environment):
                self._open[id(environment)] = environment
                if self._ended and self._open.pop(id(environment), None) is not None and hasattr(environment, "close"):
                    closing = environment.close()
                    if inspect.iscoroutine(closing):
                        asyncio.run(closing)
            return environment

        environment = await self._side.call(make)
        self._open[id(environment)] = environment
        return environment

    async def _close(self, environment: Any) -> None:
        if self._open.pop(id(environment), None) is None or not hasattr(type(environment), "close"):
            return
        try:
            await self._side.call_within(min(_CLOSE_LIMIT_S, self._side.limit_s), environment.close)
        except Exception as error:
            if not self._told:
                self._told = True
                logger.warning("closing an environment failed; further failures are not told", exc_info=error)

    async def close(self) -> None:
        """The run ends: close what is left, of rollouts that were cancelled while it was made."""
        self._ended = True
        for environment in list(self._open.values()):
            await self._close(environment)


def with_observation(prompt: Prompt, observation: Any) -> list[Message]:
    """The prompt's messages, the observation appended to the last one's content.

    Raises:
        RequestFailed: it is a list, and not of content parts.
    """
    if observation is None:
        return prompt.messages
    *before, last = prompt.messages
    content = last["content"]
    if isinstance(observation, list) and not all(isinstance(part, dict) and "type" in part for part in observation):
        raise RequestFailed(
            "environment",
            f"reset returned {str(observation)[:_SHOWN_CHARS]}: return text, or a list of content parts such as "
            '{"type": "text", "text": …}; what is not text yet, `str` or `json.dumps` makes text',
        )
    if isinstance(content, list) or isinstance(observation, list):  # parts, as multimodal templates take them
        parts = [
            value if isinstance(value, list) else [{"type": "text", "text": str(value)}] for value in (content, observation)
        ]
        return [*before, {**last, "content": parts[0] + parts[1]}]
    return [*before, {**last, "content": content + str(observation)}]
