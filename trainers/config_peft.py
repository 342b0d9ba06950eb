"""The `peft` part of a configuration: which adapters can be trained, and which of those a vLLM server can take."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from trainers.config_base import StrictModel

_PEFT_REFUSED = {
    "lora_bias": "a bias beside the low-rank matrices; write `bias: lora_only` to train the biases of the adapted layers",
    "target_parameters": "it adapts tensors outside linear layers; write `target_modules`",
    "layer_replication": "it changes the number of layers, and the server has those of `model`",
    "trainable_token_indices": "it trains single rows of the embedding; write `modules_to_save: [embed_tokens]` for all",
    "alora_invocation_tokens": "such an adapter acts from a token on, and rows are packed without knowing it; leave it out",
    "loftq_config": "it quantises the base model, whose log-probabilities would not be the server's; leave it out",
    "inference_mode": "an adapter in inference mode is not trained; leave it out",
}


class PeftConfig(StrictModel):
    """A low-rank adapter (LoRA, arXiv:2106.09685) that is trained in place of the model's own weights."""

    r: int = Field(16, ge=1, description="Rank. Default 16.")
    lora_alpha: float = Field(32, gt=0, description="The adapter is scaled by this over the rank. Default 32.")
    lora_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout before the adapter. What is trained is then not quite what was sampled. Default 0.",
    )
    target_modules: str | list[str] | None = Field(
        "all-linear",
        description='Layers with an adapter: "all-linear" (default: all but the head), names, a regular expression, or null: '
        "peft's own choice.",
    )
    exclude_modules: str | list[str] | None = Field(None, description="Layers without one: names, or a regular expression.")
    use_rslora: bool = Field(False, description="Scale by α / √r instead of α / r. Default false.")
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = Field(
        True, description="How the adapter begins; with true and gaussian it changes nothing at first. Default true."
    )
    rank_pattern: dict[str, int] = Field(default_factory=dict, description="Ranks of layers by name, where not `r`.")
    alpha_pattern: dict[str, float] = Field(default_factory=dict, description="α of layers by name, where not `lora_alpha`.")
    layers_to_transform: int | list[int] | None = Field(None, description="Numbers of the layers to adapt. Default all.")
    use_dora: bool = Field(False, description="Weight-decomposed (DoRA). Served merged, never as an adapter. Default false.")
    bias: Literal["none", "all", "lora_only"] = Field(
        "none", description="Train biases too: of all layers or the adapted ones. Then served merged. Default none."
    )
    modules_to_save: list[str] | None = Field(
        None, description="Modules trained whole beside the adapter. Then served merged. Default none."
    )
    task_type: Literal["CAUSAL_LM"] = Field("CAUSAL_LM", description="As peft writes it; nothing else can be trained.")
    peft_type: Literal["LORA"] = Field("LORA", description="As peft writes it; nothing else can be trained.")

    @classmethod
    def refusal(cls, name: str) -> str | None:
        if name in _PEFT_REFUSED:
            return f"peft option `{name}` cannot be used: {_PEFT_REFUSED[name]}"
        return super().refusal(name)

    @property
    def largest_rank(self) -> int:
        return max([self.r, *self.rank_pattern.values()])

    @property
    def merged_only(self) -> str | None:
        """What of it no vLLM server takes as an adapter, so that it must be merged into the weights that are served."""
        if self.use_dora:
            return "use_dora"
        if self.bias != "none":
            return f"bias={self.bias}"
        if self.modules_to_save:
            return "modules_to_save"
        return f"rank {self.largest_rank}, above {ADAPTER_RANKS[-1]}" if self.largest_rank > ADAPTER_RANKS[-1] else None


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank may be


class AdapterServing(NamedTuple):
    """What a server must be started with to take a run's adapters."""

    max_lora_rank: int
    max_loras: int
