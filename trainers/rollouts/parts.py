"""What a run's conversations are made of: the tokenizer with its chat template, tools, environments, reward functions.

    config, payload ─▶ functions of the user's, imported first ─▶ tokenizer and schemas, without torch ─▶ Conversations, scorer

A `Payload` (objects of a script) goes before the config's import paths.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainers.config import AsyncTrainerConfig, DistillationConfig, GRPOConfig, TrainerConfig
from trainers.data import PromptBuilder, Rows, load_tokenizer
from trainers.errors import ConfigError
from trainers.metrics import MetricBag
from trainers.references import resolve
from trainers.rewards import load_callable, load_object
from trainers.rewards.columns import require_columns_of
from trainers.rollouts.conversation import Conversations
from trainers.rollouts.environments import Environments
from trainers.rollouts.group_scorer import GroupScorer
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.rollouts.payload import Payload
from trainers.rollouts.scoring import Scorer
from trainers.rollouts.side_calls import SideCalls
from trainers.rollouts.teachers import TeacherScorer
from trainers.rollouts.tools import Toolbox, make_tool
from trainers.streams import Stream
from trainers.vocabulary import local_tokenizer

_FORK_THRESHOLD_TOKENS = 1024  # where the config does not say; only a `loop_cls` then makes turns that could differ


@contextmanager
def without_torch(config: TrainerConfig) -> Iterator[None]:
    """Inside, transformers comes without torch if nothing here has imported it yet: that saves 5 s of CPU and 300 MB.

    transformers looks for torch once, when it is imported. It is forgotten afterwards, so that a function of the user's that
    wants a model finds one that knows of torch.
    """
    if "torch" in sys.modules or "transformers" in sys.modules or config.trust_remote_code:
        yield
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python marks a module as not to be found
    try:
        yield
    finally:
        del sys.modules["torch"]
        if _runs_code_of_the_users(config):
            for name in [name for name in sys.modules if name == "transformers" or name.startswith("transformers.")]:
                del sys.modules[name]


def _runs_code_of_the_users(config: TrainerConfig) -> bool:
    if isinstance(config, AsyncTrainerConfig) and config.loop_cls is not None:
        return True
    if not isinstance(config, GRPOConfig):
        return False
    if config.tools or config.environment_factory is not None:
        return True
    return not all(spec.path.startswith("trainers.rewards:") for spec in config.reward_funcs)


class Parts:
    """Tokenizer, prompts and, for a run that generates, what its rollouts use.

    Args:
        at_once: rollouts at once, and so calls of synchronous tools and environments, and requests to one teacher.
    """

    def __init__(self, config: TrainerConfig, payload: Payload, metrics: MetricBag, at_once: int) -> None:
        self._config, self._payload, self._metrics, self._at_once = config, payload, metrics, at_once
        self._functions: list[Any] = []
        self._environments: Environments | None = None
        if isinstance(config, AsyncTrainerConfig):
            self._side = SideCalls(at_once, config.vllm_server_timeout)
        if isinstance(config, GRPOConfig):
            self._functions = [load_callable(spec) for spec in config.tools] if payload.tools is None else payload.tools
            factory = _factory(config, payload)
            self._environments = Environments(factory, self._side, metrics) if factory is not None else None

    async def open(self) -> None:
        """Load the tokenizer and find out what the model is to be told of its tools, beside the event loop.

        Raises:
            ConfigError: the model has no tokenizer, or a tool or the environment cannot be used.
        """
        environments = self._environments
        try:
            if environments is not None:
                await environments.look()
            await asyncio.to_thread(self._load)
        finally:
            if environments is not None:
                await environments.looked()

    def _load(self) -> None:
        with without_torch(self._config):
            self.tokenizer = self._payload.tokenizer or load_tokenizer(self._config)
            methods = self._environments.tools() if self._environments is not None else []
            self._tools = Toolbox([*(make_tool(function) for function in self._functions), *methods])
        self.builder = PromptBuilder(self.tokenizer, self._config, self._tools.schemas)

    def conversations(self, config: AsyncTrainerConfig, progress: Callable[[], None]) -> Conversations:
        with_tools = isinstance(config, GRPOConfig)
        return Conversations(
            self.builder.chat,
            self._tools,
            self._side,
            self._metrics,
            environments=self._environments,
            max_tool_calling_iterations=config.max_tool_calling_iterations if with_tools else None,
            fork_threshold_tokens=config.fork_threshold_tokens if with_tools else _FORK_THRESHOLD_TOKENS,
            progress=progress,
        )

    def scorer(self, config: AsyncTrainerConfig, rows: Rows | Stream, progress: Callable[[], None]) -> GroupScorer:
        """The teachers, or the reward functions.

        Args:
            progress: called while a teacher is waited for.

        Raises:
            ConfigError: see `_rewards`.
        """
        if isinstance(config, DistillationConfig):
            return TeacherScorer(
                config, self.tokenizer, self._tokenizer_of, at_once=self._at_once, metrics=self._metrics, progress=progress
            )
        assert isinstance(config, GRPOConfig), config
        return self._rewards(config, rows)

    def _tokenizer_of(self, root: str | None) -> Any | None:
        """As `local_tokenizer`."""
        with without_torch(self._config):
            return local_tokenizer(root, self._config.trust_remote_code)

    def _rewards(self, config: GRPOConfig, rows: Rows | Stream) -> Scorer:
        """The reward functions.

        Raises:
            ConfigError: nothing at all would give a reward, or a function needs a column that `rows` has not.
        """
        functions = self._payload.reward_funcs or [load_callable(spec) for spec in config.reward_funcs]
        if config.reward_weights is not None and len(config.reward_weights) != len(functions):
            raise ConfigError(f"reward_weights has {len(config.reward_weights)} values for {len(functions)} reward functions")
        scorer = Scorer(functions, config.reward_weights, self._metrics)
        named = [(function.name, function.function) for function in scorer.functions]
        require_columns_of(named, rows.source, rows.columns, config.dataset.prompt_column)
        own = self._environments.reward_name if self._environments is not None else None
        if own is not None and own in [function.name for function in scorer.functions]:
            raise ConfigError(f"a reward function and the environment's class are both called `{own}`: rename one")
        if not functions and own is None and self._payload.loop_class is None and config.loop_cls is None:
            raise ConfigError(
                "no reward function is given: name at least one in `reward_funcs`, or give the environment a `get_reward`"
            )
        return scorer


def loop_class(config: AsyncTrainerConfig, payload: Payload) -> type[AsyncRolloutLoop]:
    """The class that generates and scores. Raises `ConfigError` if the config names something else."""
    if payload.loop_class is not None:
        return payload.loop_class
    if config.loop_cls is None:
        return AsyncRolloutLoop
    found = load_object(config.loop_cls.path)
    if not (isinstance(found, type) and issubclass(found, AsyncRolloutLoop)):
        raise ConfigError(f"loop_cls: `{config.loop_cls.path}` is {found!r}: it must be a subclass of AsyncRolloutLoop")
    if config.loop_cls.kwargs:
        raise ConfigError("loop_cls takes no kwargs: what the class needs can be its class attributes, or be made in `setup`")
    return found


def _factory(config: GRPOConfig, payload: Payload) -> Callable[[], Any] | None:
    """What makes environments; None: the run has none."""
    spec = config.environment_factory
    if payload.environment_factory is not None or spec is None:
        return payload.environment_factory
    found = load_object(spec.path)
    if not callable(found):
        raise ConfigError(f"environment_factory: `{spec.path}` is a {type(found).__name__}: name a class or a function")
    return functools.partial(found, **resolve(spec.kwargs)) if spec.kwargs else found
