"""The flows, and named starting points for common cases of them: `loopwright run grpo --preset NAME`.

A preset is the part of a config that is the same for everyone in its case; a deployment of its own has its form filled in with
it. It names no dataset, and a model only where the case is about a small one; a test completes each with both and validates it
against its run config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.errors import ConfigError

# What is deployed. By module, not by file: the worker runs the installed code, whatever folder it was started in.
ENTRYPOINTS = {
    "grpo": "flows.grpo.train_grpo",
    "distillation": "flows.distill.distill_mopd",
    "sft": "flows.sft.sft_long_context",
    "specialise-and-merge": "flows.recipe.specialise_and_merge",
    "sweep": "flows.sweep.sweep",
    "evaluate": "flows.evaluate_flow.evaluate",
    "serve": "flows.serving_flow.serve_model",
    "reap": "flows.maintenance.reap",
}


@dataclass(frozen=True)
class Preset:
    """What `name` sets on top of the defaults of run config `kind`, and the one line that says what it is for."""

    name: str
    kind: str
    summary: str
    fields: Mapping[str, Any] = field(default_factory=dict)


_GRADED_ANSWERS = {"reward_funcs": [{"path": "trainers.rewards:accuracy_reward"}]}
_ON_GPU = {"dtype": "float32", "bf16": True}  # float32 masters, computed in bfloat16
# One GPU generates, one trains; models of up to about 4B parameters.
_ONE_OF_EACH = {
    "max_steps": 200,
    "max_completion_length": 2048,
    "gradient_accumulation_steps": 8,
    "token_budget": 8192,
    "servers": {"student": {"gpus": 1, "max_model_len": 4096}},
    "trainer": {"ranks": 1, "gpus": 1},
}

_ALL = (
    Preset(
        "grpo-cpu-tiny",
        "grpo",
        "A few GRPO steps of a 135M model on a CPU, to see everything work; the dataset has the columns prompt and answer.",
        {
            **_GRADED_ANSWERS,
            "model": "smollm2-135m-instruct",
            "max_steps": 4,
            "num_generations": 4,
            "max_completion_length": 64,
            "gradient_accumulation_steps": 2,
            "token_budget": 512,
            "gradient_checkpointing": False,
            "learning_rate": 2e-5,
            "max_staleness": 2,
            "max_concurrent_rollouts": 8,
            "servers": {"student": {"gpus": 0, "max_model_len": 512}},
            "trainer": {"gpus": 0},
        },
    ),
    Preset(
        "grpo-two-gpus",
        "grpo",
        "GRPO of all weights of a model up to about 4B parameters: one GPU generates, one trains.",
        {
            **_GRADED_ANSWERS,
            **_ON_GPU,
            **_ONE_OF_EACH,
            "num_generations": 8,
        },
    ),
    Preset(
        "grpo-lora-two-gpus",
        "grpo",
        "GRPO of a low-rank adapter, which needs a fraction of the trainer's memory: one GPU generates, one trains.",
        {
            **_GRADED_ANSWERS,
            **_ONE_OF_EACH,
            "dtype": "bfloat16",  # the frozen base; the adapter is float32
            "bf16": True,
            "peft": {"r": 16, "lora_alpha": 32},
            "num_generations": 8,
            "learning_rate": 2e-5,
        },
    ),
    Preset(
        "grpo-eight-gpus",
        "grpo",
        "GRPO of all weights on one machine of eight GPUs: four servers of one GPU generate, four ranks train, sharded.",
        {
            **_GRADED_ANSWERS,
            **_ON_GPU,
            "max_steps": 500,
            "num_generations": 16,
            "max_completion_length": 4096,
            "gradient_accumulation_steps": 8,
            "token_budget": 16384,
            "servers": {"student": {"count": 4, "gpus": 1, "max_model_len": 8192}},
            "trainer": {"ranks": 4, "gpus": 4},
        },
    ),
    Preset(
        "distill-three-gpus",
        "distillation",
        "Distillation of one teacher, named in servers.teachers: one GPU for it, one for the student's server, one trains.",
        {
            **_ON_GPU,
            **_ONE_OF_EACH,
            "teacher_top_k": 16,
        },
    ),
    Preset(
        "mopd-five-gpus",
        "distillation",
        "Three specialists merged into one student by reverse KL: three GPUs for the teachers, one for the "
        "student's server, one trains. Each row of the dataset names its teacher in `teacher_id`.",
        {
            **_ON_GPU,
            "beta": 1.0,
            "teacher_balance": True,
            "max_steps": 200,
            "max_completion_length": 4096,
            "gradient_accumulation_steps": 8,
            "token_budget": 16384,
            "servers": {"student": {"gpus": 1, "max_model_len": 8192}},
            "trainer": {"ranks": 1, "gpus": 1},
        },
    ),
    Preset(
        "sft-cpu-tiny",
        "sft",
        "A few SFT steps of a 135M model on a CPU; the dataset has the columns prompt and completion.",
        {
            "model": "smollm2-135m-instruct",
            "max_steps": 4,
            "num_train_epochs": 1,
            "max_length": 256,
            "per_device_train_batch_size": 2,
            "gradient_checkpointing": False,
            "trainer": {"gpus": 0},
        },
    ),
    Preset(
        "sft-one-gpu",
        "sft",
        "SFT of all weights on one GPU, three passes over the dataset.",
        {
            **_ON_GPU,
            "num_train_epochs": 3,
            "max_length": 4096,
            "gradient_accumulation_steps": 8,
            "token_budget": 8192,
            "save_steps": 200,
            "trainer": {"ranks": 1, "gpus": 1},
        },
    ),
    Preset(
        "sft-lora-one-gpu",
        "sft",
        "SFT of a low-rank adapter on one GPU, three passes over the dataset.",
        {
            "dtype": "bfloat16",
            "bf16": True,
            "peft": {"r": 16, "lora_alpha": 32},
            "num_train_epochs": 3,
            "max_length": 4096,
            "gradient_accumulation_steps": 8,
            "token_budget": 8192,
            "learning_rate": 2e-4,
            "save_steps": 200,
            "trainer": {"ranks": 1, "gpus": 1},
        },
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def find_preset(name: str, kind: str | None = None) -> Preset:
    """The preset `name`, which must be of `kind` if one is given.

    Raises:
        ConfigError: there is none, or it is another kind's; the message lists those that fit.
    """
    preset = PRESETS.get(name)
    if preset is not None and kind in (None, preset.kind):
        return preset
    fitting = ", ".join(one.name for one in _ALL if kind in (None, one.kind)) or "none"
    if preset is None:
        raise ConfigError(f"there is no preset {name!r}; there are: {fitting}")
    raise ConfigError(f"preset {name!r} is for {preset.kind}, not for {kind}; for {kind} there are: {fitting}")
