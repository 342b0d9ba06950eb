"""What Loopwright makes of every field of `transformers.TrainingArguments` (5.16 to 5.19). Data, without transformers or torch.

Each name is in exactly one of two tables. `SUPPORTED` names work: as a field of the same name in `trainers.config`, or, for
those in `PYTHON_ONLY`, as an argument of the public classes' configs that they act on. A name in `REFUSED` may be left at
its default and nothing else; the text says why and what to write instead. `docs/training_arguments.md` is made from these
tables, and a test compares them with the installed transformers.
"""

from __future__ import annotations

import importlib.util

SUPPORTED: dict[str, str] = {
    "output_dir": "Checkpoints and logs go here. In a run config the flow fills it in from `storage.uri` and `name`.",
    "per_device_train_batch_size": "Samples per packed row when `token_budget` ≤ 0; else it sizes `max_concurrent_rollouts`.",
    "num_train_epochs": "Passes over the prompts, used when `max_steps` is -1. Default 1.",
    "max_steps": "Optimizer steps.",
    "learning_rate": "Default 1e-6.",
    "lr_scheduler_type": "Default constant. A schedule that decays needs `max_steps`.",
    "lr_scheduler_kwargs": "As in transformers.",
    "warmup_steps": "As in transformers: below 1 it is a fraction of `max_steps`.",
    "optim": "As in transformers, for optimizers that work on sharded parameters. Default adamw_torch.",
    "optim_args": "As in transformers.",
    "weight_decay": "As in transformers: not applied to biases and norms.",
    "adam_beta1": "As in transformers.",
    "adam_beta2": "As in transformers.",
    "adam_epsilon": "As in transformers.",
    "gradient_accumulation_steps": "Micro-batches per optimizer step. The loss is normalised over all of them at once.",
    "max_grad_norm": "Clips the global norm over all ranks. 0: no clipping.",
    "bf16": "None (default): true on a GPU, false on CPU.",
    "gradient_checkpointing": "Default true.",
    "gradient_checkpointing_kwargs": "As in transformers.",
    "logging_steps": "A whole number of optimizer steps. Default 1.",
    "logging_first_step": "As in transformers.",
    "save_steps": "A whole number of optimizer steps. Default 50; there is always a checkpoint at the end.",
    "save_total_limit": "Newest checkpoints kept. Default 3.",
    "seed": "Seeds shuffling (by seed and epoch), sampling and initialisation.",
    "resume_from_checkpoint": "Used by `train()` when that is called without its own `resume_from_checkpoint`.",
    "report_to": "Loggers beside Loopwright's own metrics, by transformers' names; see docs/tracking.md. Default none.",
    "parallelism_config": "`cp_size` and `sp_size` of an accelerate `ParallelismConfig`; its other sizes are refused.",
    "run_name": "Read by the callbacks of `report_to`.",
    "project": "Read by the callbacks of `report_to`.",
    "trackio_space_id": "Read by the callbacks of `report_to`.",
    "trackio_bucket_id": "Read by the callbacks of `report_to`.",
    "trackio_static_space_id": "Read by the callbacks of `report_to`.",
    "log_level": "Level of transformers' own loggers on rank 0.",
    "log_level_replica": "Level of transformers' own loggers on the other ranks.",
}

# Supported by the Python class, and what a run config has in their place.
PYTHON_ONLY: dict[str, str] = {
    "resume_from_checkpoint": "a run resumes from its last whole checkpoint by itself, or with `loopwright resume RUN`",
    "parallelism_config": "write `cp_size` and `sp_size`",
    "run_name": "write `name`",
    "project": "write `tracking.experiment`",
    "trackio_space_id": "runs are recorded in MLflow: set `tracking.uri`",
    "trackio_bucket_id": "runs are recorded in MLflow: set `tracking.uri`",
    "trackio_static_space_id": "runs are recorded in MLflow: set `tracking.uri`",
    "log_level": "set TRANSFORMERS_VERBOSITY in the environment",
    "log_level_replica": "set TRANSFORMERS_VERBOSITY in the environment",
}

# Loggers a run may have beside MLflow, and the package each needs.
LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}

_EVAL = (
    "evaluation is greedy generation on the server, not a forward pass over batches; set `eval` (dataset, every, reward_func)"
)
_HUB = "nothing is pushed while training; after it, call `push_to_hub` on the model that `save_model` wrote"
_LOADER = "there is no DataLoader: the rollout process tokenizes, plans and packs; its depth is `queue_maxsize`"
_DDP = "ranks are sharded with FSDP2, there is no DistributedDataParallel to tune; leave it out"
_FSDP = "ranks are always sharded with FSDP2, by decoder layer; start more of them with torchrun or `trainer.ranks`"
_COMPILE = "every packed row has another length, so that a compiled forward would be compiled again and again; leave it out"
_BEST = "no checkpoint is chosen by a metric; compare `eval/accuracy` of the checkpoints kept by `save_total_limit`"
_LIGER = "its fused loss hides the logits that the objectives read; log-probabilities are computed in chunks already"
_BATCHES = "evaluation has no batches of tensors; set `eval`"
_SCRIPT = "a switch of transformers' example scripts; call `train()`"

REFUSED: dict[str, str] = {
    # Optimizer
    "optim_target_modules": "layer-wise optimizers (GaLore, APOLLO) do not work on sharded parameters; write optim=adamw_torch",
    "average_tokens_across_devices": "always true: a loss is divided by the token count of the whole step, over all ranks",
    "label_smoothing_factor": "the objective defines the loss; leave it at 0",
    # Precision and speed
    "fp16": "float16 training needs loss scaling, which hides the non-finite losses that stop a run; write bf16=true",
    "bf16_full_eval": _EVAL,
    "fp16_full_eval": _EVAL,
    "tf32": "call torch.set_float32_matmul_precision in your script; with bf16 (the default on a GPU) it changes nothing",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": "a training forward keeps no KV cache; leave it out",
    "neftune_noise_alpha": "noise on the embeddings makes the trained policy another one than the served; leave it out",
    "torch_empty_cache_steps": "it slows the step and frees nothing that the next one does not take; lower `token_budget`",
    "auto_find_batch_size": "a changed batch size changes the experiment; on running out of memory lower `token_budget`",
    # Logging
    "logging_strategy": "logging goes by steps; set `logging_steps`",
    "log_on_each_node": "metrics are reduced over all ranks and logged once, by rank 0",
    "logging_nan_inf_filter": "a loss that is not finite stops the run (DivergenceError); nothing filters it",
    "include_num_input_tokens_seen": "the metric `num_tokens` is always there; leave it out",
    "disable_tqdm": "there is no progress bar: a line is printed per logged step; pass ProgressCallback in `callbacks`",
    # Evaluation
    "eval_strategy": _EVAL,
    "eval_steps": "write eval.every",
    "eval_delay": _EVAL,
    "per_device_eval_batch_size": _BATCHES,
    "prediction_loss_only": _BATCHES,
    "eval_on_start": "a run with `eval` is always evaluated before its first step",
    "eval_do_concat_batches": _BATCHES,
    "eval_use_gather_object": _BATCHES,
    "eval_accumulation_steps": _BATCHES,
    "include_for_metrics": _BATCHES,
    "batch_eval_metrics": _BATCHES,
    "do_train": _SCRIPT,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    # Checkpoints
    "save_only_model": "a checkpoint that cannot be resumed is not one; `save_model` writes the model alone",
    "save_strategy": "checkpoints go by steps, and one is written at the end; set `save_steps`",
    "save_on_each_node": "checkpoints go to one folder that all ranks see; leave it out",
    "enable_jit_checkpoint": "always on: SIGTERM makes the trainer write a checkpoint at the next step and stop",
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    "ignore_data_skip": "always true: the position in the data is in the checkpoint's rollout_state.json; nothing is replayed",
    "restore_callback_states_from_checkpoint": "keep a callback's state in a file that its on_save writes",
    # Hub
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    # Randomness and data
    "full_determinism": "what the server samples depends on timing; data order and seeds are deterministic through `seed`",
    "data_seed": "prompts are shuffled by (`seed`, epoch); set `seed`, or shuffle=false for the order of the dataset",
    "dataloader_drop_last": "every sample is trained: a last, partial step is filled with empty rows",
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "remove_unused_columns": "always false: every column of the dataset is a keyword argument of the reward functions",
    "label_names": "labels are the sampled tokens; leave it out",
    "train_sampling_strategy": "prompts are shuffled, or taken in order with shuffle=false; packing evens out lengths",
    "length_column_name": "lengths are known from tokenizing; leave it out",
    # Devices and ranks
    "use_cpu": 'GPUs are used where there are any; set CUDA_VISIBLE_DEVICES="", or `trainer.gpus: 0` in a run config',
    "accelerator_config": "the loop does not run on accelerate; `accelerate launch` and torchrun only start its ranks",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": "nccl on GPUs and gloo on CPU; leave it out",
    "ddp_timeout": "waiting is bounded by `rollout_worker_timeout` and `vllm_server_timeout`",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "deepspeed": "ZeRO would replace the optimizer step; FSDP2 shards the same tensors: start more ranks with torchrun",
    "local_rank": "the launcher (torchrun, accelerate) sets LOCAL_RANK; leave it out",
    # Debugging
    "debug": "a loss that is not finite stops the run; torch.autograd.set_detect_anomaly looks further",
    "skip_memory_metrics": "`perf/peak_memory_bytes` is always there on a GPU; leave it out",
}

# Of accelerate's `ParallelismConfig`: sizes that must stay 1, and why.
PARALLELISM_REFUSED: dict[str, str] = {
    "tp_size": "a layer is not split over ranks, FSDP2 shards the model; for sequences too long, write sp_size or cp_size",
    "dp_replicate_size": "ranks are always sharded with FSDP2, over all of them; leave it out",
}

# Where the only accepted value is not transformers' default.
FIXED: dict[str, bool] = {"ignore_data_skip": True, "remove_unused_columns": False, "logging_nan_inf_filter": False}


def config_refusal(name: str) -> str | None:
    """Why a run config may not have the `TrainingArguments` field `name`; None if the name is no such field."""
    if name in REFUSED:
        return f"`{name}` cannot be used: {REFUSED[name]}"
    if name in PYTHON_ONLY:
        return f"`{name}` is an argument of the Python class only: {PYTHON_ONLY[name]}"
    return None


def missing_logger(name: str) -> str | None:
    """What is wrong with `report_to` naming this logger, if its package is known and not installed."""
    package = LOGGER_PACKAGES.get(name)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"report_to: {name} needs the package {package}: pip install {package}, or leave it out"


def docs_page() -> str:
    """`docs/training_arguments.md`."""
    lines = [
        "# TrainingArguments",
        "",
        "Every field of `transformers.TrainingArguments` and what Loopwright makes of it. The supported ones work in",
        "`AsyncGRPOConfig`, `AsyncDistillationConfig` and, unless marked *Python*, in a run config. A refused one may be",
        "left at its default; any other value is an error that gives the reason below. Made by",
        "`python -m trainers.training_arguments`.",
        "",
        "## Supported",
        "",
        "| field | |",
        "| --- | --- |",
    ]
    for name, note in sorted(SUPPORTED.items()):
        mark = f" *Python*; in a run config: {PYTHON_ONLY[name]}." if name in PYTHON_ONLY else ""
        lines.append(f"| `{name}` | {note}{mark} |")
    lines += ["", "## Refused", "", "| field | why, and what to write instead |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(docs_page(), end="")
