"""Users' `TrainerCallback`s through transformers' `CallbackHandler`, and where metrics go.

Events fire as in `Trainer`: on_train_begin, per step on_step_begin, on_pre_optimizer_step, on_optimizer_step, on_step_end,
then on_log, on_evaluate, on_save where `control` asks for them, and on_train_end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from trainers.distributed import Ranks
from trainers.step_source import SourceInfo


class MetricSink(Protocol):
    """Where rank 0 reports to. Every method returns at once."""

    def started(self, info: SourceInfo, resume_step: int) -> None:
        """The source has read its data; `resume_step` 0: from the beginning."""
        ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def commit(self, step: int) -> None:
        """A checkpoint of `step` is whole: metrics up to it are final."""
        ...

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Rollouts to keep, each with its `trace`. Those to be printed are printed by the loop."""
        ...

    def artifact(self, path: Path, name: str) -> None:
        """Keep a folder of the run's, which stays as it is, under `name`."""
        ...

    def bottleneck(self, step: int, text: str) -> None: ...
    def checkpoint(self, step: int, path: str) -> None: ...


class PrintSink:
    """One line a step on standard output."""

    def started(self, info: SourceInfo, resume_step: int) -> None:
        size = "a stream of" if info.prompts is None else info.prompts
        print(f"{size} prompts, data {info.fingerprint}, from step {resume_step}", flush=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        shown = ("loss", "reward", "grad_norm", "learning_rate", "num_tokens", "perf/step_s")
        shown += ("eval/accuracy", "eval/loss", "needle/mean")
        values = "  ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)
        print(f"step {step}  {values}", flush=True)

    def commit(self, step: int) -> None:
        """Nothing is held back."""

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """There is nowhere to keep them."""

    def artifact(self, path: Path, name: str) -> None:
        print(f"{name}: {path}", flush=True)

    def bottleneck(self, step: int, text: str) -> None:
        print(f"step {step}  {text}", flush=True)

    def checkpoint(self, step: int, path: str) -> None:
        print(f"step {step}  checkpoint {path}", flush=True)


class FlowCallback(DefaultFlowCallback):
    """Transformers' rules for logging, saving and stopping; `max_steps` −1 never stops a run by its count."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        limit = state.max_steps
        if limit < 0:
            state.max_steps = sys.maxsize
        control = super().on_step_end(args, state, control, **kwargs)
        state.max_steps = limit
        return control


class Patience(TrainerCallback):
    """Stops training once `patience` evaluations in a row brought no better `eval/accuracy`.

    What it remembers is the state's `best_metric` and `best_global_step`, so a resumed run counts on. Every rank is given the
    same metrics and so comes to the same end.
    """

    def __init__(self, every: int, patience: int) -> None:
        self.steps = every * patience

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        accuracy = kwargs["metrics"].get("eval/accuracy")
        if accuracy is not None and (state.best_metric is None or accuracy > state.best_metric):
            state.best_metric, state.best_global_step = accuracy, state.global_step
        elif state.best_global_step is not None and state.global_step - state.best_global_step >= self.steps:
            control.should_training_stop = True
        return control


class Callbacks:
    """State, control and handler together. `control` flags are agreed between ranks, since what they ask for is collective."""

    def __init__(
        self,
        callbacks: list[TrainerCallback | type[TrainerCallback]],
        args: TrainingArguments,
        ranks: Ranks,
        *,
        model: Any,
        tokenizer: Any,
        optimizer: Any,
        scheduler: Any,
    ) -> None:
        self.args = args
        self.ranks = ranks
        self.handler = CallbackHandler([FlowCallback(), *callbacks], model, tokenizer, optimizer, scheduler)
        self.control = TrainerControl()
        self.state = TrainerState(
            max_steps=args.max_steps,
            num_train_epochs=int(-(-args.num_train_epochs // 1)),
            train_batch_size=args.per_device_train_batch_size,
            is_local_process_zero=ranks.local_rank == 0,
            is_world_process_zero=ranks.is_main,
        )
        self.state.compute_steps(args, args.max_steps)

    def fire(self, event: str, **kwargs: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **kwargs)

    def step_end(self, stop_signal: bool) -> bool:
        """Fire on_step_end, agree on `control` across ranks; returns whether any rank was told to stop by a signal."""
        self.fire("on_step_end")
        control = self.control
        control.should_log, control.should_evaluate, control.should_save, control.should_training_stop, signalled = (
            self.ranks.any(
                control.should_log, control.should_evaluate, control.should_save, control.should_training_stop, stop_signal
            )
        )
        return signalled
