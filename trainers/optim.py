"""Optimizer and schedule from transformers, gradient clipping over DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler

from trainers.config import TrainerConfig
from trainers.distributed import full
from trainers.errors import ConfigError

ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")


def training_arguments(config: TrainerConfig, device: torch.device) -> TrainingArguments:
    """`TrainingArguments` as users' callbacks, the optimizer factory and the schedule read them.

    Raises:
        ConfigError: transformers refuses a value.
    """
    names = (
        "output_dir",
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "optim",
        "optim_args",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "logging_steps",
        "logging_first_step",
        "save_steps",
        "save_total_limit",
        "seed",
    )
    check_schedule(config)
    every = config.eval.every if config.eval is not None else 0
    try:
        return TrainingArguments(
            **{name: getattr(config, name) for name in names},
            eval_strategy="steps" if every else "no",
            eval_steps=every or None,
            report_to=[],
            use_cpu=device.type == "cpu",
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transformers refuses the training arguments: {error}") from error


def check_schedule(config: TrainerConfig) -> None:
    """Refuse a schedule that must know its length in a run that does not.

    Raises:
        ConfigError: with the two ways out.
    """
    name = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    if name == "reduce_lr_on_plateau":
        raise ConfigError(
            "lr_scheduler_type reduce_lr_on_plateau needs an evaluation loss, which this loop has not; use cosine or linear"
        )
    if config.max_steps < 0 and name not in ENDLESS_SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type {name!r} decays over max_steps, which is -1: set max_steps, or use one of "
            + ", ".join(ENDLESS_SCHEDULES)
        )
    if config.max_steps < 0 and 0 < config.warmup_steps < 1:
        raise ConfigError(f"warmup_steps {config.warmup_steps} is a fraction of max_steps, which is -1: give a number of steps")


def build_optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """The optimizer transformers' `Trainer` would build; norms and biases without weight decay.

    Raises:
        ConfigError: the optimizer is unknown, is not installed, or replaces the training loop's own steps.
    """
    try:
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    except (ValueError, ImportError) as error:
        raise ConfigError(f"optim {args.optim!r}: {error}") from error
    if unusual := {"params", "model", "optimizer_dict"} & set(kwargs):
        raise ConfigError(
            f"optim {args.optim!r} wants {sorted(unusual)}, which sharded parameters cannot give; use adamw_torch"
        )
    decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained if name in decay], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained if name not in decay], "weight_decay": 0.0},
    ]
    return cls([group for group in groups if group["params"]], **kwargs)


def build_scheduler(config: TrainerConfig, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The named schedule; `warmup_steps` below 1 is a fraction of `max_steps`."""
    check_schedule(config)
    length = config.max_steps if config.max_steps > 0 else None
    warmup = config.warmup_steps
    steps = int(warmup) if warmup >= 1 or length is None else int(-(-warmup * length // 1))
    try:
        return get_scheduler(config.lr_scheduler_type, optimizer, steps, length, config.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type {config.lr_scheduler_type!r}: {error}") from error


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Global gradient norm before clipping (a whole scalar on every rank); clips in place if `max_norm` > 0."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if max_norm > 0:
        return full(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    return full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
