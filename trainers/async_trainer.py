"""What the trainer classes share: train from a script, against vLLM servers that are up if any, without Prefect and MLflow.

    script ─ Async…Trainer(model, …, args, train_dataset).train()
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
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from trainers import attention, lora, session
from trainers.arguments import ArgumentsBase
from trainers.checkpoint import checkpoints, fault, latest_whole
from trainers.data import Rows, as_data, load_tokenizer
from trainers.distributed import shutdown_distributed
from trainers.errors import CheckpointError, ConfigError
from trainers.loggers import reporting_callbacks
from trainers.loop import TrainLoop
from trainers.rewards import reward_name
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.rollouts.payload import Payload, count_train_call, in_rollout_process, require_picklable
from trainers.streams import Stream

logger = logging.getLogger(__name__)


class AsyncTrainer:
    """One trainer; `AsyncGRPOTrainer`, `AsyncDistillationTrainer`, `LongContextSFTTrainer` say what it is given, and check it.

    Raises:
        TypeError: an argument is of the wrong kind.
        ConfigError: a value is wrong; DatasetError where it is the dataset's.
    """

    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
    """Class of the loop that generates and scores; name a subclass here to change one of its steps."""

    args_class: ClassVar[Any]
    """The `TrainingArguments` dataclass of this trainer, made by `trainers.arguments.arguments_from`."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        self._model: PreTrainedModel | None = None
        if not isinstance(model, str):
            self._model, peft_config = lora.unwrapped(model, peft_config)
        self.model_name: str = model if isinstance(model, str) else model.config._name_or_path
        self.peft_config = peft_config
        folder = f"{Path(self.model_name).name}-{self.args_class.__name__.removesuffix('Config')}"
        self.args: Any = args if args is not None else self.args_class(output_dir=folder)
        self.train_dataset = train_dataset
        self.callbacks = list(callbacks or [])
        self.optimizers = optimizers
        self._given_tokenizer = processing_class
        self._tokenizer: Any = processing_class
        self._loop: TrainLoop | None = None  # of the last train()
        if not in_rollout_process():
            self._check()
            _ = self.config  # what is wrong with it is said now

    def _check(self) -> None:
        """What was given is of the right kind, as far as can be told before the config is made."""
        if not isinstance(self.args, ArgumentsBase) or not issubclass(self.args.config_class, self.args_class.config_class):
            expected = self.args_class.__name__
            raise TypeError(f"args is a {type(self.args).__name__}: pass an {expected}, or a dataclass derived from it")
        if self.train_dataset is None:
            raise ConfigError("train_dataset is missing: pass a Dataset or a list of dicts with a column `prompt`")
        self._check_dataset()
        if not issubclass(self.loop_cls, AsyncRolloutLoop):
            raise TypeError(f"loop_cls is {self.loop_cls!r}: it must be a subclass of AsyncRolloutLoop")
        if self._model is None and self.model_name.startswith(("/", ".", "~")) and not Path(self.model_name).is_dir():
            raise ConfigError(
                f"model {self.model_name!r}: there is no such folder; give a folder with a config.json, or a hub id"
            )
        if self._model is not None and getattr(self.args, "model_init_kwargs", None):
            raise ConfigError("model_init_kwargs is for a model given by name; this one is loaded already")

    def _check_dataset(self) -> None:
        """`train_dataset` can be read."""
        self._check_data(as_data(self.train_dataset, "train_dataset"))

    def _check_data(self, data: Rows | Stream) -> None:
        """The dataset has the columns that this trainer needs."""
        data.require("prompt")

    def _given(self) -> dict[str, Any]:
        """What the config says of objects that this trainer was given: how to import them."""
        return {"loop_cls": None if self.loop_cls is AsyncRolloutLoop else import_path(self.loop_cls)}

    def _dataset(self) -> dict[str, Any]:
        """What the config says of the dataset, which comes with the payload."""
        return {"path": "train_dataset"}

    @cached_property
    def config(self) -> Any:
        """The run's configuration, as its checkpoints record it."""
        return self.args.to_config(
            model=self.model_name,
            dataset=self._dataset(),
            **self._given(),
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
        payload = Payload(dataset=self.train_dataset, tokenizer=self._given_tokenizer)
        if self.loop_cls is not AsyncRolloutLoop:
            payload.loop_class, payload.args = self.loop_cls, self.args
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


def import_path(value: Any) -> str:
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
