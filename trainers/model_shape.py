"""A model's dimensions, read from its config.json alone: what its memory and its time can be told from. Imports no torch.

folder or hub id ─▶ config.json ─▶ ModelShape ─▶ trainers.memory_plan, trainers.step_time
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.errors import ConfigError

# Fields of a config that say that its layers are not attention and one gated MLP, and what to call them.
_OTHER_LAYERS = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "linear_num_value_heads": "linear-attention layers",
    "ssm_state_size": "state-space layers",
    "is_encoder_decoder": "an encoder and a decoder",
}
_TRAINED = "original_max_position_embeddings"
_COUNTS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")  # numbers that may be left out
_QK_NORMS = ("qwen3", "olmo2", "gemma3", "gemma3_text")  # types that norm queries and keys


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of equal layers: attention, then a gated MLP of three matrices.

    Example: Qwen3-0.6B is `ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norms=True)`, 596 million parameters.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True  # the head's weight is the embedding's
    qk_norms: bool = False  # queries and keys have norms of their own
    plain_norms: bool = True  # weight · x / √mean(x²), which `trainers.norm_kernels` computes
    window: int | None = None  # tokens of a sliding window, if any layer has one
    trained_positions: int | None = None

    @property
    def query(self) -> int:
        """Width of all queries, which is that of attention's output."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys, which is that of all values."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * (2 * self.query + 2 * self.key)
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norms else 0)
        return attention + self.mlp_parameters + norms

    @property
    def mlp_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def embedding_parameters(self) -> int:
        """Of embedding and head, counted once where they are one."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of a low-rank adapter on every linear of every layer: rank × (inputs + outputs) of each."""
        wide = self.hidden
        attention = 2 * (wide + self.query) + 2 * (wide + self.key)
        return self.layers * rank * (attention + 3 * (wide + self.intermediate))


def shape_of(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes.

    Args:
        name: of the model, for errors.

    Raises:
        ConfigError: its layers are of another kind, or a dimension is not there.
    """
    text = _section(config, name, "text_config") or config
    for field, kind in _OTHER_LAYERS.items():
        if text.get(field) or config.get(field):
            raise ConfigError(
                f"model {name!r} has {kind} ({field}={text.get(field) or config.get(field)}): what its layers keep is not "
                "known here; measure one step of it instead (perf/peak_memory_bytes)"
            )
    kinds = text.get("layer_types") or []
    strange = {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])} - {"full_attention", "sliding_attention"}
    if strange:
        raise ConfigError(
            f"model {name!r} has layers of type {', '.join(sorted(strange))}: only attention layers are known here"
        )
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [field for field in names if text.get(field) is None]
    if missing:
        raise ConfigError(f"the config.json of model {name!r} has no {', '.join(missing)}: its shape cannot be told from it")
    scaling = _section(text, name, "rope_parameters") or _section(text, name, "rope_scaling") or {}
    for field, value in (*((field, text.get(field)) for field in (*names, *_COUNTS)), (_TRAINED, scaling.get(_TRAINED))):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(
                f"the config.json of model {name!r} has {field}={value!r}: it must be a whole number of 1 or more"
            )
    layers, hidden, intermediate, heads, vocabulary = (text[field] for field in names)
    slides = "sliding_attention" in kinds or (not kinds and text.get("sliding_window") and text.get("use_sliding_window", True))
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        vocabulary=vocabulary,
        # transformers' own default is true; models that untie say so.
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
        qk_norms=text.get("model_type") in _QK_NORMS,
        plain_norms=not str(text.get("model_type")).startswith("gemma"),  # theirs scale by 1 + weight
        window=text.get("sliding_window") if slides else None,
        trained_positions=scaling.get(_TRAINED) or text.get("max_position_embeddings"),
    )


def _section(config: dict[str, Any], name: str, field: str) -> dict[str, Any] | None:
    """An object within a config.json. Raises `ConfigError`: it is something else."""
    value = config.get(field)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"the config.json of model {name!r} has {field}={value!r}: it must be an object")
    return value


def read_shape(model: str) -> ModelShape:
    """Of a model in a folder, of a config.json, or of a hub id whose config.json is fetched.

    Raises:
        ConfigError: there is no such file, it is no config, or see `shape_of`.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if path.suffix == ".json" or Path(model).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            raise ConfigError(f"there is no {path}: name a model's folder, its config.json or its hub id (owner/name)")
        path = _from_hub(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model configuration: it holds a {type(config).__name__}")
    return shape_of(config, model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # its own, requests' and httpx's
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the config.json of model {model!r} cannot be fetched: {first}; name a folder instead") from error
