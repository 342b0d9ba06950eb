"""`AsyncGRPOTrainer`: train from a script, against a vLLM server that is already up, with neither Prefect nor MLflow.

    script ─ AsyncGRPOTrainer(model, reward_funcs, args, train_dataset).train()
               every rank: model, loop, weight sync          rank 0: the rollout process, with the script's objects as a payload

In the rollout process the script is imported again for the objects defined in it. There a trainer is inert: it loads
nothing, and its `train()` ends the import (`trainers/rollouts/payload.py`).
"""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from trainers import attention, lora, session
from trainers.arguments import ArgumentsBase, AsyncGRPOConfig
from trainers.checkpoint import checkpoints, fault, latest_whole
from trainers.config import GRPOConfig
from trainers.data import as_data, load_tokenizer
from trainers.distributed import shutdown_distributed
from trainers.errors import CheckpointError, ConfigError
from trainers.loggers import reporting_callbacks
from trainers.loop import TrainLoop
from trainers.rewards import reward_name
from trainers.rewards.columns import require_columns_of
from trainers.rollouts.environments import class_tools
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.rollouts.payload import Payload, count_train_call, in_rollout_process, require_picklable
from trainers.rollouts.tools import Toolbox, make_tool

logger = logging.getLogger(__name__)

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]


class AsyncGRPOTrainer:
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

    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
    """Class of the loop that generates and scores; name a subclass here to change one of its steps."""

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
        self._model: PreTrainedModel | None = None
        if not isinstance(model, str):
            self._model, peft_config = lora.unwrapped(model, peft_config)
        self.model_name: str = model if isinstance(model, str) else model.config._name_or_path
        self.peft_config = peft_config
        self.args: Any = args if args is not None else AsyncGRPOConfig(output_dir=f"{Path(self.model_name).name}-AsyncGRPO")
        self.reward_funcs: list[Any] = (
            [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs or [])
        )
        self.train_dataset = train_dataset
        self.callbacks = list(callbacks or [])
        self.optimizers = optimizers
        self.tools: list[Any] = [tools] if callable(tools) else list(tools or [])
        self.environment_factory = environment_factory
        self._given_tokenizer = processing_class
        self._tokenizer: Any = processing_class
        self._loop: TrainLoop | None = None  # of the last train()
        if not in_rollout_process():
            self._check()
            _ = self.config  # what is wrong with it is said now

    def _check(self) -> None:
        if not isinstance(self.args, ArgumentsBase):
            raise TypeError(f"args is a {type(self.args).__name__}: pass an AsyncGRPOConfig, or a dataclass derived from it")
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
        if self.train_dataset is None:
            raise ConfigError("train_dataset is missing: pass a Dataset or a list of dicts with a column `prompt`")
        data = as_data(self.train_dataset, "train_dataset")
        if self.environment_factory is None:
            data.require("prompt")
        named = [(reward_name(function), function) for function in self.reward_funcs]
        require_columns_of(named, data.source, data.columns, "prompt")
        if not issubclass(self.loop_cls, AsyncRolloutLoop):
            raise TypeError(f"loop_cls is {self.loop_cls!r}: it must be a subclass of AsyncRolloutLoop")
        if self._model is None and self.model_name.startswith(("/", ".", "~")) and not Path(self.model_name).is_dir():
            raise ConfigError(
                f"model {self.model_name!r}: there is no such folder; give a folder with a config.json, or a hub id"
            )
        if self._model is not None and getattr(self.args, "model_init_kwargs", None):
            raise ConfigError("model_init_kwargs is for a model given by name; this one is loaded already")

    @cached_property
    def config(self) -> GRPOConfig:
        """The run's configuration, as its checkpoints record it."""
        factory, loop_cls = self.environment_factory, self.loop_cls
        return self.args.to_config(
            model=self.model_name,
            dataset={"path": "train_dataset"},
            reward_funcs=[_import_path(function) for function in self.reward_funcs],
            tools=[_import_path(tool) for tool in self.tools],
            environment_factory=None if factory is None else _import_path(factory),
            loop_cls=None if loop_cls is AsyncRolloutLoop else _import_path(loop_cls),
            **({} if self.peft_config is None else {"peft": lora.config_of(self.peft_config)}),
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model; loaded when first asked for, or by `train()`."""
        if self._model is None:
            from trainers.model import load_model

            self._model = load_model(self.config)
        return self._model

    @property
    def processing_class(self) -> Any:
        """The tokenizer; loaded when first asked for."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config)
        return self._tokenizer

    @property
    def state(self) -> Any:
        """transformers' `TrainerState` of the last `train()`: `global_step`, `epoch`, `log_history`, …"""
        if self._loop is None:
            raise AttributeError("there is no state before train()")
        return self._loop.callbacks.state

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callbacks.append(callback)

    def is_world_process_zero(self) -> bool:
        return self.args.process_index == 0

    # Training --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train, and save at the end. Without a checkpoint to go on from, older ones in `output_dir` are set aside.

        Args:
            resume_from_checkpoint: a checkpoint folder; True: the newest whole one in `output_dir`. Default:
                `args.resume_from_checkpoint`.

        Raises:
            TypeError: a reward function or the loop class is a lambda or closure, which no other process can import.
            CheckpointError: the checkpoint is not whole, or there is none.
            LoopwrightError: whatever ends a run; see `trainers.errors`.
        """
        count_train_call()
        if in_rollout_process():
            return TrainOutput(0, 0.0, {})
        payload = self._payload()
        began = time.perf_counter()
        transformers_logging.set_verbosity(self.args.get_process_log_level())
        ranks = session.join_ranks(self.config)
        atexit.register(shutdown_distributed)
        resume = ranks.rank_zero(lambda: self._checkpoint(resume_from_checkpoint))
        usual = getattr(self.model.config, "_attn_implementation", None)
        usual = "sdpa" if usual in (None, attention.NAME) else usual
        with session.stop_on_sigterm() as stop_requested:
            self._loop = session.build_loop(
                self.config,
                ranks,
                model=self.model,
                policy=self._loop.policy if self._loop is not None else None,
                tokenizer=self.processing_class,
                payload=payload,
                args=self.args,
                callbacks=[
                    *self.callbacks,
                    *reporting_callbacks(self.args.report_to, project=self.args.project, run_name=self.args.run_name),
                ],
                optimizers=self.optimizers,
                stop_requested=stop_requested,
            )
            try:
                result = self._loop.run(resume)
            finally:
                # The packed attention runs packed rows only; a script may want to generate.
                self.model.set_attn_implementation(usual)
        if result.stopped == "signal":
            sys.exit(128 + signal.SIGTERM)  # the checkpoint is written; the script's later lines are for a finished run
        return self._output(time.perf_counter() - began)

    def save_model(self, output_dir: str | Path | None = None, *, merged: bool = False) -> None:
        """Write model and tokenizer as `from_pretrained` reads them; an adapter alone, as peft reads it. Call it on every rank.

        Args:
            output_dir: default: that of `args`.
            merged: with an adapter, write the whole model with the adapter merged in.
        """
        if in_rollout_process():
            return
        folder = Path(output_dir or self.args.output_dir)
        if self._loop is not None:
            self._loop.checkpointer.export(folder, merged=merged)
        elif self.is_world_process_zero():
            self.model.save_pretrained(folder)
        if self.is_world_process_zero():
            self.processing_class.save_pretrained(folder)

    def _payload(self) -> Payload:
        """What the rollout process needs of this script; small things are tried now, before anything starts."""
        payload = Payload(self.reward_funcs, self.train_dataset, self._given_tokenizer)
        payload.tools, payload.environment_factory = self.tools, self.environment_factory
        if self.loop_cls is not AsyncRolloutLoop:
            payload.loop_class, payload.args = self.loop_cls, self.args
        for function in self.reward_funcs:
            require_picklable("reward function", function)
        for tool in self.tools:
            require_picklable("tool", tool)
        require_picklable("environment_factory", self.environment_factory)
        # What is wrong with their docstrings is said before anything starts.
        methods = class_tools(self.environment_factory) if isinstance(self.environment_factory, type) else []
        Toolbox([*(make_tool(tool) for tool in self.tools), *methods])
        require_picklable("loop class", payload.loop_class)
        require_picklable("args", payload.args)
        return payload

    def _checkpoint(self, choice: bool | str | Path | None) -> Path | None:
        choice = self.args.resume_from_checkpoint if choice is None else choice
        output_dir = Path(self.args.output_dir)
        if choice is True:
            newest = latest_whole(output_dir)
            if newest is None:
                raise CheckpointError(f"resume_from_checkpoint=True, but {output_dir} has no whole checkpoint")
            return newest
        if choice:
            if why := fault(Path(choice)):
                raise CheckpointError(f"checkpoint {choice} is not whole: {why}")
            return Path(choice)
        _set_aside(output_dir)
        return None

    def _output(self, seconds: float) -> TrainOutput:
        """What transformers' `Trainer.train` returns. The loss is the mean over the logged steps."""
        state = self.state
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        loss = sum(losses) / len(losses) if losses else float("nan")
        metrics = {
            "train_runtime": seconds,
            "train_steps_per_second": state.global_step / seconds,
            "train_loss": loss,
            "total_flos": state.total_flos,
            "epoch": state.epoch or 0.0,
        }
        return TrainOutput(state.global_step, loss, metrics)


def _import_path(value: Any) -> str:
    """How a checkpoint's configuration names a Python object; nothing is imported by it."""
    named = value
    while isinstance(named, partial):
        named = named.func
    return f"{getattr(named, '__module__', 'python')}:{reward_name(value)}"


def _set_aside(output_dir: Path) -> None:
    """Move an earlier run's checkpoints out of the way: they would pass for this run's, at higher steps."""
    found = [path for _, path in checkpoints(output_dir)]
    if not found:
        return
    number = 1 + sum(1 for _ in output_dir.glob("earlier-*"))
    folder = output_dir / f"earlier-{number}"
    folder.mkdir()
    for path in found:
        path.rename(folder / path.name)
    logger.warning(
        "moved %d checkpoints of an earlier run to %s; to go on from them, resume_from_checkpoint", len(found), folder
    )
