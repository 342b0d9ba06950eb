"""The training loop: one optimizer step per `Step` of the source, whatever the algorithm.

    source ─▶ step ─fetch─▶ rows of this rank ─▶ forward, loss, backward per micro-batch ─▶ clip ─▶ optimizer ─▶ committed
                                                                                         weight sync ─▶ synced ◀┘
    while rank 0 waits for a step: servers that came or were started anew ─▶ every rank: weight sync to them

Invariants the loop keeps:
- a loss is divided by the whole step's counts and gradients are summed over ranks, so layout never changes the update;
- every rank runs a backward for every micro-batch, an empty row included;
- everything only rank 0 can do goes through `Ranks.rank_zero`: its failure reaches every rank, and none waits for it in vain;
- a step is `committed` after its optimizer step and before its weights are sent; a checkpoint holds the committed steps only;
- not finite loss or gradient ends the run before the optimizer sees it; a collapsed reward before the next checkpoint.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback, TrainingArguments

from trainers import optim, perf
from trainers.algorithms import Algorithm, LossInputs
from trainers.batch import PackedBatch
from trainers.callbacks import Callbacks, MetricSink, Patience, PrintSink
from trainers.checkpoint import Checkpointer
from trainers.collapse import collapsed
from trainers.completions_table import print_completions
from trainers.config import TrainerConfig
from trainers.distributed import Ranks
from trainers.errors import CheckpointError, ConfigError, DivergenceError
from trainers.losses import loss_inputs, normalise
from trainers.metrics import MetricBag, spec_of
from trainers.model import Policy, compute_dtype
from trainers.rank_rows import RankRows
from trainers.step_source import SourceInfo, StepSource
from trainers.types import PackedRow, StepHead, StepTotals
from trainers.weight_sync import WeightSync
from trainers.window import MetricWindow, metric_names

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank needs to know of a step."""

    rows: list[PackedRow]  # this rank's row of each micro-batch
    totals: StepTotals
    epoch: float  # passes over the prompts, this step's among them


@dataclass(frozen=True, slots=True)
class TrainResult:
    """`stopped`: "signal", "callback", "max_steps" or "data". `checkpoint`: the last one written."""

    step: int
    stopped: str
    checkpoint: Path | None
    metrics: dict[str, float]


class TrainLoop:
    """Trains `policy` on the steps of `source`. Every rank makes one; only rank 0's `source` and `sink` are used."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        policy: Policy,
        ranks: Ranks,
        source: StepSource | None,
        *,
        tokenizer: Any = None,
        args: TrainingArguments | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        weight_sync: WeightSync | None = None,
        sink: MetricSink | None = None,
        evaluate: Callable[[Policy, int], dict[str, float]] | None = None,
        stored_config: dict[str, Any] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.algorithm, self.policy, self.ranks = config, algorithm, policy, ranks
        self._source, self.weight_sync, self.evaluate, self.stop_requested = source, weight_sync, evaluate, stop_requested
        self.sink: MetricSink = sink or PrintSink()
        args = args or optim.training_arguments(config, ranks.device)
        self.optimizer = optimizers[0] or optim.build_optimizer(policy, args)
        self.scheduler = optimizers[1] or optim.build_scheduler(config, self.optimizer)
        patience = [Patience(config.eval.every, config.eval.patience)] if config.eval and config.eval.patience else []
        self.callbacks = Callbacks(
            [*patience, *(callbacks or [])],
            args,
            ranks,
            model=policy.model,
            tokenizer=tokenizer,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
        )
        self.checkpointer = Checkpointer(config, ranks, policy, self.optimizer, self.scheduler, tokenizer, stored_config)
        self.window = MetricWindow(["loss", *metric_names(algorithm.loss(_no_terms()))], ranks)
        self.bag = MetricBag()
        self.timer = perf.StepTimer(ranks.device)
        self.flops = perf.FlopCounter(policy.model)
        self.version = 0
        self.totals: dict[str, float] = {}
        self.last_saved: tuple[int, Path | None] = (-1, None)
        self.last_logged = 0
        self.info: SourceInfo | None = None
        self._rows = RankRows(ranks, source, config.rollout_worker_timeout)
        self._last_values: dict[str, float] = {}
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # step and metrics of the newest evaluation
        self._completions: list[dict[str, Any]] = []  # to print, of the newest step that sent any

    # One run ---------------------------------------------------------------------------------------------------------

    def run(self, resume: Path | None = None) -> TrainResult:
        """Train until `max_steps`, the end of the data, a callback or a signal; saves at the end.

        Args:
            resume: a whole checkpoint (`latest_whole`) to go on from.

        Raises:
            DivergenceError, WeightSyncError, RolloutError, ConfigError: see `trainers.errors`; the source is closed first.
        """
        state = self.callbacks.state
        try:
            self._begin(resume)
            self.callbacks.fire("on_train_begin")
            stopped = ""
            while not stopped and not self._finished():
                stopped = self._step()
            if self.last_logged < state.global_step:
                self._log()
            if self.last_saved[0] < state.global_step:
                self._save()
            if self.last_saved[0] < state.global_step:
                raise CheckpointError(f"the last step, {state.global_step}, could not be saved; see the warnings above")
            self.callbacks.fire("on_train_end")
        finally:
            self._rows.close()
            if self._source is not None:
                self._source.close()
            if self.weight_sync is not None:
                self.weight_sync.close()
        return TrainResult(state.global_step, stopped or "max_steps", self.last_saved[1], self._last_values)

    @property
    def source(self) -> StepSource:
        assert self._source is not None, "only rank 0 has a step source"
        return self._source

    def _begin(self, resume: Path | None) -> None:
        state = self.callbacks.state
        if resume is not None:
            saved, loop_state = self.checkpointer.restore(resume)
            for name in ("global_step", "epoch", "log_history", "num_input_tokens_seen", "total_flos"):
                setattr(state, name, getattr(saved, name))
            state.best_metric, state.best_global_step = saved.best_metric, saved.best_global_step
            self.version, self.totals = loop_state["version"], loop_state["totals"]
            self.last_saved, self.last_logged = (state.global_step, resume), state.global_step
            logger.info("resumed from %s at step %d, policy version %d", resume, state.global_step, self.version)
        start = {
            "resume_dir": resume,
            "version": self.version,
            "world_size": self.ranks.dp_size,
            "resume_step": state.global_step,
        }
        self.info = self.ranks.rank_zero(lambda: self.source.start(**start))
        self._rows.open()
        if self.ranks.is_main:
            self.sink.started(self.info, state.global_step)
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        if self.info.vocab_size > vocabulary:
            raise ConfigError(
                f"the tokenizer makes ids up to {self.info.vocab_size - 1} but the model has {vocabulary} embeddings: "
                "use the model's own tokenizer"
            )
        self._push_weights()

    def _step(self) -> str:
        """One optimizer step and what follows it; returns why the run stops here, or nothing."""
        began = time.perf_counter()
        state, index = self.callbacks.state, self.callbacks.state.global_step + 1
        with self.timer.host("rollout_wait"):
            work, head = self._next_work(index)
        if work is None:
            if self.ranks.is_main:
                self._pass_on_rollouts(state.global_step)  # those that finished after the last step was planned
            return "data"
        self.callbacks.fire("on_step_begin")
        norm = self._train(work)
        state.global_step, state.epoch = index, work.epoch
        state.num_input_tokens_seen += work.totals.forwarded_tokens
        if self.ranks.is_main:
            self.source.committed(index)
        if self.weight_sync and index % getattr(self.config, "weight_sync_steps", 1) == 0:
            self.version += 1
            self._push_weights()
        self._account(head, norm, time.perf_counter() - began)
        signalled = self.callbacks.step_end(self.stop_requested())
        control = self.callbacks.control
        if control.should_log:
            self._log()
        if control.should_evaluate:
            self._evaluate()
        if control.should_save or signalled:
            self._save()
        return "signal" if signalled else "callback" if control.should_training_stop and not self._finished() else ""

    def _finished(self) -> bool:
        return 0 <= self.config.max_steps <= self.callbacks.state.global_step

    def _next_work(self, index: int) -> tuple[Work | None, StepHead | None]:
        """This rank's part of step `index`, and on rank 0 what is said of it; asks for the step after it."""
        head: StepHead | None = None

        def hand_over() -> tuple[StepTotals | None, float] | Literal["servers"]:
            nonlocal head
            while not self.source.ready(index, self.version, LOOK_EVERY_S):
                # Without a server that holds the weights there would never be a step.
                if self.weight_sync is not None and self.weight_sync.wanting():
                    return "servers"
            head = self.source.next_step(index, self.version)
            if head is None:
                return None, self.source.passes
            assert head.index == index, f"asked for step {index}, got {head.index}"
            if not 0 <= self.config.max_steps <= index:
                every = getattr(self.config, "weight_sync_steps", 1)
                self.source.request_step(index + 1, self.version + (1 if self.weight_sync and index % every == 0 else 0))
            return head.totals, self.source.passes

        while (told := self.ranks.rank_zero(hand_over)) == "servers":
            assert self.weight_sync is not None, "servers without a weight sync"
            self.weight_sync.admit(self.policy, self.version)
            self._announce()
        totals, passes = told
        if totals is None:
            self.callbacks.state.epoch = passes  # with what was dropped after the last step
            return None, None
        return Work(self._rows.fetch(index), totals, passes), head

    def _train(self, work: Work) -> float:
        """Gradients of the whole step and the optimizer's step; returns the gradient norm before clipping.

        Raises:
            DivergenceError: on every rank, if any rank's loss or the gradient norm is not finite. Nothing was updated.
        """
        step_loss = torch.zeros((), device=self.ranks.device, dtype=torch.float64)
        with self.timer.device("fwd_bwd"):
            for row in work.rows:
                batch = PackedBatch.from_row(row, self.ranks.device, sequence=self.ranks.sequence)
                outputs = self.policy(batch)
                if batch.terms:
                    output = self.algorithm.loss(loss_inputs(outputs, batch))
                    loss = normalise(output, work.totals, self.ranks.dp_size)
                    if self.ranks.leads:  # ranks that share a row all know its metrics
                        self.window.add(output.metrics)
                else:
                    # No terms: a zero that depends on every parameter, so that sharded gradients are reduced by all ranks.
                    loss = outputs[0].sum()
                loss.backward()
                step_loss += loss.detach() * self.ranks.leads  # one that is not finite stays so
        with self.timer.device("optimizer"):
            norm = optim.clip_gradients(self.policy, self.config.max_grad_norm)
            # The step's one synchronisation: what is not finite must not reach the weights, the servers or a checkpoint.
            values = torch.stack([norm.double(), step_loss]).tolist()
            if self.ranks.any(not all(map(math.isfinite, values)))[0]:
                step = self.callbacks.state.global_step + 1
                raise DivergenceError(
                    f"step {step}: loss {values[1]:.6g}, gradient norm {values[0]:.6g}: the run stops before this update"
                )
            self.window.add({"loss": (step_loss, 1.0 if self.ranks.is_main else 0.0)})
            self.callbacks.fire("on_pre_optimizer_step")
            self.optimizer.step()
            self.callbacks.fire("on_optimizer_step")
            self.learning_rate = self.scheduler.get_last_lr()[0]
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
        return values[0]

    # After a step ----------------------------------------------------------------------------------------------------

    def _push_weights(self) -> None:
        if self.weight_sync is None:
            return
        for name, value in self.weight_sync.push(self.policy, self.version).items():
            self.bag.add(name, value)
        self._announce()
        if self.ranks.is_main:
            self.source.synced(self.version, self.weight_sync.served_as)

    def _announce(self) -> None:
        """Tell the source which servers hold the newest policy, if others do."""
        if self.ranks.is_main and self.weight_sync is not None and (servers := self.weight_sync.news()) is not None:
            self.source.servers(servers)

    def _account(self, step: StepHead | None, norm: float, seconds: float) -> None:
        """Rank 0: add the step's own metrics, times and rates to the bag; say which side limits."""
        times = self.timer.drain()
        if step is None:
            return
        bag, totals = self.bag, step.totals
        bag.merge(step.metrics)
        bag.add("grad_norm", norm)
        bag.add("learning_rate", float(self.learning_rate))
        bag.add("num_tokens", totals.forwarded_tokens)
        bag.add("cost/tokens/trained", totals.tokens)
        if self.ranks.device.type == "cuda":
            bag.add("cost/idle_gpu_s/trainer", times.get("rollout_wait", 0.0) * self.ranks.world_size)
        for name in ("fwd_bwd", "optimizer", "rollout_wait"):
            bag.add(f"perf/{name}_s", times.get(name, 0.0))
        bag.add("perf/step_s", seconds)
        bag.add("perf/forwarded_tok_s_fwd_bwd", totals.forwarded_tokens, times["fwd_bwd"])
        bag.add("perf/forwarded_tok_s_wall_clock", totals.forwarded_tokens, seconds)
        bag.add("perf/trained_tok_s_wall_clock", totals.tokens, seconds)
        flops = self.flops.step(totals)
        self.callbacks.state.total_flos += flops
        if self.ranks.device.type == "cuda":
            dtype = compute_dtype(self.config, self.ranks.device) or self.policy.model.dtype
            peak = perf.peak_flops(torch.cuda.get_device_name(), dtype)
            if peak is not None:
                bag.add("perf/mfu_fwd_bwd", flops, peak * self.ranks.world_size * times["fwd_bwd"])
                bag.add("perf/mfu_wall_clock", flops, peak * self.ranks.world_size * seconds)
            bag.add("perf/peak_memory_bytes", torch.cuda.max_memory_allocated())
        held_back = step.metrics.get("rollout/backpressure_s", (0.0, 1.0))[0]
        self.sink.bottleneck(step.index, perf.bottleneck(seconds, times.get("rollout_wait", 0.0), held_back))
        self._pass_on_rollouts(step.index)

    def _pass_on_rollouts(self, step: int) -> None:
        rows = self.source.drain_rollouts()
        self._completions = [row for row in rows if "trace" not in row] or self._completions
        if kept := [row for row in rows if "trace" in row]:
            self.sink.rollouts(step, kept)

    def _log(self) -> None:
        pairs = self.window.reduce()
        state = self.callbacks.state
        self.last_logged = state.global_step
        self.bag.merge(pairs)
        values: dict[str, float] = {}
        drained, self.bag = self.bag.values(), MetricBag()
        for name, value in drained.items():
            if spec_of(name).reduction == "total":
                value = self.totals[name] = self.totals.get(name, 0.0) + value
            values[name] = value
        self._last_values = values
        state.log_history.append({**values, "step": state.global_step, "epoch": state.epoch})
        if self.ranks.is_main:
            self.sink.log(state.global_step, values)
            if self._completions:
                print_completions(self._completions, sys.stdout)
                self._completions = []
        self.callbacks.fire("on_log", logs=dict(values))
        if (rule := getattr(self.config, "reward_collapse", None)) is not None:
            why = collapsed(state.log_history, rule)
            if self.ranks.any(why is not None)[0]:  # only rank 0 knows of rewards
                raise DivergenceError(why or "rank 0: the reward collapsed")

    def _evaluate(self) -> None:
        metrics: dict[str, float] = {}
        if self.evaluate is not None:
            metrics = self.evaluate(self.policy, self.version)
            if self.ranks.is_main:
                self.sink.log(self.callbacks.state.global_step, metrics)
        self._evaluated = (self.callbacks.state.global_step, metrics)
        self.callbacks.fire("on_evaluate", metrics=metrics)

    def _save(self) -> None:
        state = self.callbacks.state
        assert self.info is not None, "nothing is saved before the source has started"
        loop_state = {
            "version": self.version,
            "totals": self.totals,
            "world_size": self.ranks.world_size,
            "info": asdict(self.info),
        }
        measured = self._last_values | (self._evaluated[1] if self._evaluated[0] == state.global_step else {})
        path = self.checkpointer.save(state, loop_state, lambda directory: self.source.snapshot(directory), measured)
        if path is None:
            return
        self.last_saved = (state.global_step, path)
        self.callbacks.fire("on_save")
        if self.ranks.is_main:
            self.sink.commit(state.global_step)
            self.sink.checkpoint(state.global_step, str(path))


def _no_terms() -> LossInputs:
    none = torch.empty(0)
    return LossInputs(none, none, none.bool(), none, none, none.long(), none.view(0, 0), none.view(0, 0), none, none.long())
