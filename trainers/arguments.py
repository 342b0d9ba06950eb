"""`TrainingArguments` dataclasses made from the pydantic configs, for scripts that train with a Python class.

    GRPOConfig (pydantic) ── arguments_from ──▶ AsyncGRPOConfig (dataclass, TrainingArguments) ── to_config ──▶ GRPOConfig
    DistillationConfig ───── arguments_from ──▶ AsyncDistillationConfig ── to_config ──▶ DistillationConfig
    SFTConfig ────────────── arguments_from ──▶ LongContextSFTConfig ── to_config ──▶ SFTConfig

The pydantic model stays the one place where a field, its default and its check are written. The dataclass adds what scripts
expect: it is a `TrainingArguments`, may be subclassed with `@dataclass`, and works with `HfArgumentParser`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from functools import cached_property, partial
from typing import Any, get_args, get_origin

import torch
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from transformers import TrainingArguments

from trainers.config import DistillationConfig, GRPOConfig, SFTConfig, TrainerConfig
from trainers.config_parts import CallableSpec
from trainers.errors import ConfigError
from trainers.rollouts.payload import in_rollout_process
from trainers.training_arguments import FIXED, PARALLELISM_REFUSED, REFUSED

# What the trainer class is given as arguments of its own.
_GIVEN_APART = ("type", "model", "dataset", "reward_funcs", "tools", "environment_factory", "loop_cls")
_TRAINING_FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _default_of(info: FieldInfo) -> dict[str, Any]:
    """The default of a pydantic field as a dataclass's. Where a list is possible, HfArgumentParser reads factories only."""
    parts = (info.annotation, *get_args(info.annotation))
    if info.default_factory is None and not any(get_origin(part) is list for part in parts):
        return {"default": info.default}
    return {"default_factory": partial(info.get_default, call_default_factory=True)}


class ArgumentsBase(TrainingArguments):
    """What every class made by `arguments_from` can do. `config_class` is the pydantic model it came from."""

    config_class: type[TrainerConfig]

    def __post_init__(self) -> None:
        self._refuse()
        self._share_rows()
        if in_rollout_process():
            return  # a script imported for its reward functions: no devices to set up, nothing to check twice
        raw = {name: getattr(self, name) for name in (*REFUSED, "bf16")}
        self.bf16 = False  # transformers refuses bfloat16 without a GPU; here the CPU can do it
        super().__post_init__()
        for name, value in raw.items():
            setattr(self, name, value)  # as given, so that `dataclasses.replace` sees defaults as defaults
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available()
        if isinstance(self.eval, BaseModel):
            self.eval = self.eval.model_dump(exclude_unset=True)
        if isinstance(self.peft, BaseModel):
            self.peft = self.peft.model_dump(exclude_unset=True)
        for name in self.config_class.model_fields:
            if isinstance(value := getattr(self, name, None), BaseModel):
                setattr(self, name, value.model_dump(exclude_unset=True))
        for name, value in self._from_eval().items():
            setattr(self, name, value)
        given: dict[str, Any] = {"model": "-", "dataset": {"path": "-"}}
        if weights := getattr(self, "reward_weights", None):
            given["reward_funcs"] = [CallableSpec(path="rewards:any")] * len(weights)  # the trainer's `reward_funcs` follow
        if self.peft is None and getattr(self, "weight_sync", "") == "lora":
            given["peft"] = {}  # the trainer's `peft_config` may follow
        self.to_config(**given)

    def to_config(self, **given: Any) -> Any:
        """The pydantic config: these arguments and what the trainer class was `given` (model, dataset, reward_funcs, …).

        Raises:
            ConfigError: one line per field with a value it cannot have.
        """
        values: dict[str, Any] = {}
        for name in self.config_class.model_fields:
            if name not in _GIVEN_APART:
                value = getattr(self, name)
                values[name] = getattr(value, "value", value)  # enums of transformers
        try:
            return self.config_class.model_validate({**values, **given})
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, item['loc'])) or 'config'}: {item['msg']}" for item in error.errors()]
            raise ConfigError("\n".join(lines)) from None

    def to_dict(self) -> dict[str, Any]:
        """As loggers show it: keyword arguments whose names say that they are secrets are hidden, like transformers' own."""
        return _hidden(super().to_dict())

    def _refuse(self) -> None:
        """Raises `ConfigError` for a refused field that is not at its default, with the reason and what to write instead."""
        derived = self._from_eval()
        for name, reason in REFUSED.items():
            field = _TRAINING_FIELDS.get(name)
            if field is None:  # another version of transformers has it
                continue
            value, default = getattr(self, name), FIXED.get(name, _default(field))
            if not value and (not default or default == "no"):
                continue  # off in another spelling: HfArgumentParser writes False and None
            if value != default and value != derived.get(name, default):
                raise ConfigError(f"{type(self).__name__}({name}={value!r}) cannot be used: {reason}")

    def _share_rows(self) -> None:
        """Take `cp_size` and `sp_size` over from an accelerate `ParallelismConfig`.

        Raises:
            ConfigError: it asks for more than these, or for others than the fields of these names.
        """
        given = self.parallelism_config
        if given is None:
            return
        if not hasattr(given, "cp_size"):
            raise ConfigError(
                f"parallelism_config is a {type(given).__name__}: pass accelerate's ParallelismConfig, or cp_size"
            )
        for name, reason in PARALLELISM_REFUSED.items():
            if (getattr(given, name) or 1) > 1:
                raise ConfigError(f"ParallelismConfig({name}={getattr(given, name)}) cannot be used: {reason}")
        places = self.world_size
        for name in ("cp_size", "sp_size"):
            size, own = getattr(given, name, None) or 1, getattr(self, name)
            if size > 1 and own not in (1, size):
                raise ConfigError(f"{name}={own}, and parallelism_config has {name}={size}: write one of the two")
            setattr(self, name, max(size, own))
            places //= max(size, own)
        sharded = given.dp_shard_size or 1
        if sharded not in (1, places):
            raise ConfigError(
                f"ParallelismConfig(dp_shard_size={sharded}) cannot be used: FSDP2 shards over all ranks, of which {places} "
                "would have rows of their own; leave it out"
            )

    def _from_eval(self) -> dict[str, Any]:
        """What transformers' flow of events reads for `eval.every`."""
        every = self.eval.every if isinstance(self.eval, BaseModel) else (self.eval or {}).get("every", 0)
        return {"eval_strategy": "steps", "eval_steps": every, "do_eval": True} if every else {}

    # Transformers would start a process group and take devices here; ranks and devices are `trainers.distributed`'s.

    @cached_property
    def _setup_devices(self) -> torch.device:
        self.distributed_state = None
        self._n_gpu = int(torch.cuda.is_available())
        return torch.device("cuda", self.local_process_index) if self._n_gpu else torch.device("cpu")

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))

    @property
    def process_index(self) -> int:
        return int(os.environ.get("RANK", 0))

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "<hidden>" if _hides(name, item) else _hidden(item) for name, item in value.items()}
    return value


def _hides(name: Any, value: Any) -> bool:
    return (
        isinstance(value, str)
        and bool(re.search(r"(^|_)(token|key|password|secret)$", str(name)))
        and not value.startswith("<")
    )


def arguments_from(config: type[TrainerConfig], name: str, module: str) -> Any:
    """A `TrainingArguments` dataclass with the fields and defaults of `config`, importable as `module.name`."""
    changed = [
        (field, type_, dataclasses.field(default=FIXED[field]))
        for field, type_ in ((field, bool) for field in FIXED)
        if field in _TRAINING_FIELDS
    ]
    own = [
        (field, info.annotation, dataclasses.field(**_default_of(info), metadata={"help": info.description}))
        for field, info in config.model_fields.items()
        if field not in _GIVEN_APART
    ]
    own = [item if item[0] != "output_dir" else (*item[:2], dataclasses.field(default="trainer_output")) for item in own]
    namespace = {"config_class": config, "__module__": module, "__doc__": f"Arguments of a run: {config.__doc__}"}
    return dataclasses.make_dataclass(name, [*changed, *own], bases=(ArgumentsBase,), namespace=namespace, repr=False)


AsyncGRPOConfig: Any = arguments_from(GRPOConfig, "AsyncGRPOConfig", __name__)
AsyncDistillationConfig: Any = arguments_from(DistillationConfig, "AsyncDistillationConfig", __name__)
LongContextSFTConfig: Any = arguments_from(SFTConfig, "LongContextSFTConfig", __name__)
