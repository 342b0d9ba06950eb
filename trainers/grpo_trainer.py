"""`AsyncGRPOTrainer`: asynchronous GRPO from a script, on reward functions, tools and environments defined in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from trainers.arguments import AsyncGRPOConfig
from trainers.async_trainer import AsyncTrainer, import_path
from trainers.data import Rows
from trainers.errors import ConfigError
from trainers.rewards import reward_name
from trainers.rewards.columns import require_columns_of
from trainers.rollouts.environments import class_tools
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.rollouts.payload import Payload, require_picklable
from trainers.rollouts.tools import Toolbox, make_tool
from trainers.streams import Stream

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]


class AsyncGRPOTrainer(AsyncTrainer):
    """Asynchronous GRPO from a script.

    Args:
        model: folder or hub id, or a causal language model that is loaded already, or a `PeftModel` with a LoRA adapter.
        reward_funcs: one or several functions, sync or async. Each is called per group with the dataset's columns, `prompts`,
            `completions` and `completion_ids` as keyword arguments, all lists, and returns a list of numbers or None.
        args: `AsyncGRPOConfig` or a dataclass derived from it. Default: its defaults, in the folder `<model>-AsyncGRPO`.
        train_dataset: a `datasets.Dataset` or list of dicts with a column `prompt` (text, or a list of chat messages); or a
            `datasets.IterableDataset`, which is read in its own order.
        processing_class: tokenizer. Default: the model's.
        callbacks: transformers' `TrainerCallback`s, classes or instances.
        optimizers: (optimizer, scheduler) to use in place of those of `args`; the optimizer over `trainer.model.parameters()`.
        tools: one or several functions the model may call by their `__name__`, sync or async; the docstring and types of each
            are what the model is shown, by the chat template.
        peft_config: `peft.LoraConfig`: train a low-rank adapter in place of the model's own weights. Default: `args.peft`.
        environment_factory: makes the environment of one rollout. Its public methods are tools, `reset(**row)` returns what is
            appended to the prompt (or None), and `get_reward()`, if there is one, is a reward: reward_funcs may then be empty.
            The dataset then needs no column `prompt`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ConfigError: a value is wrong; DatasetError where it is the dataset's.
    """

    args_class = AsyncGRPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        tools: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | None = None,
        peft_config: Any = None,
    ) -> None:
        self.reward_funcs: list[Any] = (
            [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs or [])
        )
        self.tools: list[Any] = [tools] if callable(tools) else list(tools or [])
        self.environment_factory = environment_factory
        super().__init__(model, args, train_dataset, processing_class, callbacks, optimizers, peft_config)

    def _check(self) -> None:
        if not self.reward_funcs and self.environment_factory is None and self.loop_cls is AsyncRolloutLoop:
            raise ConfigError("reward_funcs is empty: pass at least one reward function, or an environment with `get_reward`")
        if self.environment_factory is not None and not callable(self.environment_factory):
            kind = type(self.environment_factory).__name__
            raise TypeError(f"environment_factory is a {kind}: pass one class or function; it may choose by the row in `reset`")
        for tool in self.tools:
            if not callable(tool):
                raise TypeError(f"tool {tool!r} is a {type(tool).__name__}, which cannot be called: pass a function")
        for function in self.reward_funcs:
            if isinstance(function, str):
                raise TypeError(
                    f"reward function {function!r} is a string: serve a reward model with an engine of its own and pass a "
                    "function that calls it over HTTP"
                )
            if not callable(function):
                raise TypeError(f"reward function {function!r} is a {type(function).__name__}, which cannot be called")
        super()._check()

    def _check_data(self, data: Rows | Stream) -> None:
        if self.environment_factory is None:
            super()._check_data(data)
        named = [(reward_name(function), function) for function in self.reward_funcs]
        require_columns_of(named, data.source, data.columns, "prompt")

    def _given(self) -> dict[str, Any]:
        factory = self.environment_factory
        return {
            **super()._given(),
            "reward_funcs": [import_path(function) for function in self.reward_funcs],
            "tools": [import_path(tool) for tool in self.tools],
            "environment_factory": None if factory is None else import_path(factory),
        }

    def _payload(self) -> Payload:
        payload = super()._payload()
        payload.reward_funcs, payload.tools = self.reward_funcs, self.tools
        payload.environment_factory = self.environment_factory
        for function in self.reward_funcs:
            require_picklable("reward function", function)
        for tool in self.tools:
            require_picklable("tool", tool)
        require_picklable("environment_factory", self.environment_factory)
        # What is wrong with their docstrings is said before anything starts.
        methods = class_tools(self.environment_factory) if isinstance(self.environment_factory, type) else []
        Toolbox([*(make_tool(tool) for tool in self.tools), *methods])
        return payload
