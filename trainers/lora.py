"""Low-rank adapters: put into a model, saved, read as the weights that a server without adapters would serve.

    model ─ attach ─▶ same model: base frozen, adapter trainable ─▶ packed rows, sharding, checkpointing as ever
                        ├─ adapter_state ─▶ save_adapter: adapter_config.json, adapter_model.safetensors
                        └─ served_parameters ─▶ base + scaling · B A, under the names of the plain model

Invariants:
- the base is never written to: what is served is computed beside it, so that no merge has to be taken back;
- every rank begins with the same adapter, drawn from the run's seed alone.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainers.config import PeftConfig
from trainers.distributed import full
from trainers.errors import ConfigError
from trainers.tensor_file import save_tensors

ADAPTER = "default"  # peft's name of the one adapter a model has here
PREFIX = "base_model.model."  # of every tensor in an adapter's file
_MATRICES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# Of peft's options, those that say where an adapter came from and not what it is.
_NOT_OPTIONS = ("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode")


def config_of(given: Any) -> PeftConfig:
    """The configuration that a `peft.LoraConfig` stands for.

    Raises:
        ConfigError: it is another kind of adapter, or has an option that cannot be used here.
    """
    from peft import LoraConfig
    from pydantic import ValidationError

    if type(given) is not LoraConfig:
        raise ConfigError(f"peft_config is a {type(given).__name__}: only peft.LoraConfig can be trained")
    defaults = LoraConfig().to_dict()
    fields: dict[str, Any] = {}
    for name, value in given.to_dict().items():
        if name in _NOT_OPTIONS or (value == defaults[name] and name not in PeftConfig.model_fields):
            continue
        if name == "task_type" and value is None:
            continue
        value = getattr(value, "value", value)
        fields[name] = sorted(value) if isinstance(value, set) else value
    try:
        return PeftConfig.model_validate(fields)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'option'}: {item['msg']}" for item in error.errors()]
        raise ConfigError("peft_config cannot be used:\n" + "\n".join(lines)) from None


def unwrapped(model: Any, config: Any) -> tuple[PreTrainedModel, Any]:
    """A model that a script gives, out of its `PeftModel`, and the `LoraConfig` of its adapter.

    Raises:
        ConfigError: it has an adapter and another `config` is given; or the adapter does not fit this trainer.
    """
    attached = getattr(model, "peft_config", None)
    if not attached:
        return model, config
    if config is not None:
        raise ConfigError("the model has an adapter already, and peft_config asks for another: leave peft_config out")
    if list(attached) != [ADAPTER]:
        raise ConfigError(f"the model has adapters {sorted(attached)}: one can be trained, under the name {ADAPTER!r}")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    _check_places(base)
    if not any(parameter.requires_grad for parameter in base.parameters()):
        raise ConfigError("the model's adapter is frozen: load it with is_trainable=True")
    return base, attached[ADAPTER]


def is_attached(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


def attach(model: PreTrainedModel, config: PeftConfig, base: str, seed: int, text: nn.Module | None = None) -> None:
    """Put an adapter into `model`: from here on only it is trained. In float32 beside a base of 16 bits, which keeps its type.

    Args:
        base: what the adapter's files name as the model it belongs to.
        text: the part of the model that is trained, where that is not all of it: nothing outside gets an adapter.

    Raises:
        ConfigError: the adapter does not fit it.
    """
    from peft import LoraConfig, inject_adapter_in_model

    fields = config.model_dump(exclude={"peft_type"})
    if config.lora_alpha.is_integer():
        fields["lora_alpha"] = int(config.lora_alpha)  # some readers of adapters expect it so
    if text is not None:
        fields["target_modules"] = _within(model, text, config)
    lora = LoraConfig(base_model_name_or_path=base, **fields)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        try:
            inject_adapter_in_model(lora, model, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"peft: {error}") from error
    _check_places(model)
    for name, parameter in adapter_parameters(model).items():
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            continue
        if not any(part in _MATRICES for part in name.split(".")):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(
                f"peft trains {name} whole, in {kind}: small steps would be rounded away. Load the model with dtype=float32, "
                "or leave out bias and modules_to_save"
            )
        parameter.data = parameter.data.float()


def refuse_quantised(model: PreTrainedModel) -> None:
    """Of a model with or without an adapter.

    Raises:
        ConfigError: it holds quantised weights.
    """
    if getattr(model, "is_quantized", False) or not all(p.is_floating_point() for p in model.parameters()):
        raise ConfigError(
            f"{model.config._name_or_path or type(model).__name__} is loaded quantised (QLoRA): its log-probabilities are not "
            "those of the weights that are served. Load it with dtype=bfloat16 and without a quantization_config; where "
            "that is in the model's own config.json, name the model that it was made of"
        )


def _within(model: PreTrainedModel, text: nn.Module, config: PeftConfig) -> list[str]:
    """Names of the layers inside `text` that "all-linear" means."""
    if config.target_modules != "all-linear":
        raise ConfigError(
            f"peft.target_modules={config.target_modules!r} may reach outside the text part of {type(model).__name__}, which "
            'is frozen: write target_modules="all-linear", which means its text layers here, and exclude_modules'
        )
    inside = {id(module) for module in text.modules()}
    names = [name for name, module in model.named_modules() if id(module) in inside and isinstance(module, nn.Linear)]
    return [name for name in names if model.get_submodule(name) is not model.get_output_embeddings()]


def _check_places(model: PreTrainedModel) -> None:
    """Refuse what our forward or a merge would not see.

    Raises:
        ConfigError: an adapter on the head, or a part of tied embeddings trained alone.
    """
    from peft.tuners.lora import LoraLayer

    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ConfigError(
            "peft.target_modules has the output head, whose weight is used without its layer here: leave it out, or name it in "
            "modules_to_save to train all of it"
        )
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    inside = model.get_input_embeddings()
    if isinstance(inside, LoraLayer) or hasattr(inside, "modules_to_save"):
        raise ConfigError("peft adapts the input embedding, which this model shares with its head: leave it out")
    if hasattr(model.get_output_embeddings(), "modules_to_save"):
        raise ConfigError("peft.modules_to_save has the head, which this model shares with its input embedding: leave it out")


# Saving --------------------------------------------------------------------------------------------------------------


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by its name in memory."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapter_state(model: nn.Module, keep: bool, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors of what is trained, on the CPU: a collective when sharded.

    Args:
        keep: False on the ranks that only take part in the gather; they get none.
        dtype: type of the tensors; None: their own.
    """
    whole = {
        name: full(parameter.detach().to(dtype or parameter.dtype)) for name, parameter in adapter_parameters(model).items()
    }
    return _on_host(whole) if keep else {}


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of them, views of one block per type: hundreds of small copies from a GPU would take longer than the bytes do."""
    copies: dict[str, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        same = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        block = torch.cat([tensor.reshape(-1) for tensor in same.values()])
        host = torch.empty(block.shape, dtype=dtype, pin_memory=block.is_cuda).copy_(block)
        parts = host.split([tensor.numel() for tensor in same.values()])
        copies |= {name: part.view(tensor.shape) for (name, tensor), part in zip(same.items(), parts, strict=True)}
    return {name: copies[name] for name in tensors}


def save_adapter(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write an adapter as peft reads it; `state` by `adapter_state`."""
    from peft import get_peft_model_state_dict

    config: Any = model.peft_config[ADAPTER]  # type: ignore[index]
    named = get_peft_model_state_dict(model, state_dict=state, adapter_name=ADAPTER, save_embedding_layers=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors({PREFIX + name: tensor for name, tensor in named.items()}, folder / "adapter_model.safetensors")
    fields = config.to_dict() | {"inference_mode": True}
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True, default=str))


# What a server without adapters serves -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A parameter of the plain model. `layer`: peft's layer around it, whose matrices are added; None: it is as it is."""

    parameter: torch.Tensor
    layer: Any = None

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def trained(self) -> bool:
        return self.layer is not None or self.parameter.requires_grad

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it in `dtype`, on the parameter's device: a collective when sharded."""
        if self.layer is None:
            # Converted before it is gathered, which halves what travels between ranks.
            return full(self.parameter.detach().to(dtype))
        return _merged(full(self.parameter.detach()), self.layer).to(dtype)


def served_parameters(model: nn.Module) -> dict[str, Served]:
    """The parameters a server loads, under the plain model's names, in the model's order; tied ones once."""
    if not is_attached(model):
        return {name: Served(parameter) for name, parameter in model.named_parameters()}
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    served: dict[str, Served] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "original_module" in parts or any(part in _MATRICES for part in parts):
            continue
        owner, _, rest = name.partition(".base_layer.")
        layer = layers[owner] if rest == "weight" else None
        plain = name.replace(".base_layer.", ".").replace(f".modules_to_save.{ADAPTER}.", ".")
        served[plain] = Served(parameter, layer)
    return served


def _merged(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """`weight` with the layer's adapter, as peft's `merge_and_unload` computes it; `weight` stays as it is."""
    if ADAPTER in layer.lora_embedding_A:
        left, right = full(layer.lora_embedding_B[ADAPTER].detach()), full(layer.lora_embedding_A[ADAPTER].detach())
        delta = (left @ right).T * layer.scaling[ADAPTER]
    else:
        left, right = full(layer.lora_B[ADAPTER].weight.detach()), full(layer.lora_A[ADAPTER].weight.detach())
        delta = left @ right
        delta = (delta.T if layer.fan_in_fan_out else delta) * layer.scaling[ADAPTER]
    if ADAPTER not in layer.lora_magnitude_vector:
        return weight.clone().add_(delta)
    magnitude = full(layer.lora_magnitude_vector[ADAPTER].weight.detach())
    both = weight + delta
    rows = both.T if layer.fan_in_fan_out else both
    scaled = (magnitude / torch.linalg.norm(rows, dim=1).to(rows.dtype)).view(-1, 1) * rows
    return (scaled.T if layer.fan_in_fan_out else scaled).to(weight.dtype)
