"""Everything one training run is made of, put together: by `trainers.main` for a flow, by the public classes for a script.

config ─▶ ranks ─▶ tokenizer, model ─▶ policy, algorithm ─▶ rollout process (rank 0), weight sync, evaluation ─▶ TrainLoop
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from trainers import attention, lora
from trainers.algorithms import build_algorithm
from trainers.callbacks import MetricSink, PrintSink
from trainers.config import SFTConfig, TrainerConfig
from trainers.data import load_tokenizer
from trainers.distributed import Ranks, init_distributed
from trainers.errors import ConfigError
from trainers.held_out import HeldOut
from trainers.long_eval import LongEvaluation
from trainers.loop import TrainLoop
from trainers.model import Policy, build_policy, compute_dtype, load_model
from trainers.optim import check_schedule
from trainers.rollouts.payload import Payload
from trainers.rollouts.process import RolloutProcess
from trainers.weight_sync.sync import ServerSync


def join_ranks(config: TrainerConfig) -> Ranks:
    """This process among the ranks that a launcher started; collectives wait longer than rank 0 ever waits for others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest_wait_s = max(config.rollout_worker_timeout, getattr(config, "vllm_server_timeout", 0.0))
    return init_distributed(
        2 * longest_wait_s + 600.0,
        needs_mesh=compute_dtype(config, device) is not None,
        cp_size=config.cp_size,
        sp_size=config.sp_size,
    )


def build_loop(
    config: TrainerConfig,
    ranks: Ranks,
    *,
    model: PreTrainedModel | None = None,
    policy: Policy | None = None,
    tokenizer: Any = None,
    payload: Payload | None = None,
    args: TrainingArguments | None = None,
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    optimizers: tuple[Any, Any] = (None, None),
    sink: MetricSink | None = None,
    stored_config: dict[str, Any] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    managed_servers: bool = False,
) -> TrainLoop:
    """The loop of a run, not yet started. Called by every rank; nothing is sent to a server before `TrainLoop.run`.

    Args:
        model, tokenizer: loaded already; default: by `config.model`.
        policy: `model` as an earlier loop of this process left it, sharded where there are ranks.
        payload: Python objects for the rollout process.
        args: what callbacks, optimizer and schedule read; default: made from the config.
        optimizers: (optimizer, schedule); an optimizer over the parameters of `model` as they were given, an adapter's with it.
        managed_servers: a flow keeps servers.json in the run's folder (see `trainers.roster`).
        stored_config: what checkpoints record of the config (references to secrets unresolved); default: `config`.

    Raises:
        ConfigError: the model or tokenizer cannot be loaded or used.
    """
    check_schedule(config)
    seed_everything(config.seed + ranks.rank)
    dtype = compute_dtype(config, ranks.device) or torch.float32
    attention.install(ranks.device, dtype, log=ranks.is_main, on_ring=config.cp_size > 1)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config)
    model = model if model is not None else load_model(config)
    if optimizers[0] is not None and config.peft is not None and not lora.is_attached(model):
        raise ConfigError(
            "an optimizer that was made before the adapter holds none of its parameters: give a peft model (get_peft_model) as "
            "`model` and an optimizer over its trainable parameters, or leave `optimizers` out"
        )
    model.set_attn_implementation(attention.NAME)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    policy = policy or build_policy(model, config, ranks, getattr(config, "max_length", None))
    if optimizers[0] is not None:
        _rebind(optimizers[0], names, dict(model.named_parameters()))
    algorithm = build_algorithm(config)
    sync = ServerSync(config, ranks, tokenizer, managed=managed_servers) if algorithm.generates else None  # type: ignore[arg-type]
    held_out = None
    if config.eval is not None:
        held_out = HeldOut(config, ranks, tokenizer, payload, lambda: sync and sync.served_as, sync and sync.serving)
    sink = sink or PrintSink()
    callbacks = list(callbacks)
    if isinstance(config, SFTConfig) and config.long_eval is not None:
        callbacks.insert(0, LongEvaluation(config, ranks, policy, tokenizer, sink, stop_requested))
    return TrainLoop(
        config,
        algorithm,
        policy,
        ranks,
        RolloutProcess(config, payload) if ranks.is_main else None,
        tokenizer=tokenizer,
        args=args,
        callbacks=callbacks,
        optimizers=optimizers,
        weight_sync=sync,
        sink=sink,
        evaluate=held_out,
        stored_config=stored_config,
        stop_requested=stop_requested,
    )


def seed_everything(seed: int) -> None:
    """Every generator this process draws from; a resumed run takes the checkpoint's states instead."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _rebind(optimizer: torch.optim.Optimizer, names: dict[int, str], sharded: dict[str, torch.nn.Parameter]) -> None:
    """Point an optimizer made before sharding at the parameters that sharding put in place of those it holds."""
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(p)]] if id(p) in names else p for p in group["params"]]


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """While open, SIGTERM asks for a stop after the current step instead of ending the process; yields whether it came.

    Signal handlers belong to the main thread: in another one, nothing is installed and the answer stays no.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop.is_set
    finally:
        with contextlib.suppress(TypeError):  # a handler that was not installed from Python cannot be put back
            signal.signal(signal.SIGTERM, before)
