"""The policy: a transformers causal language model run on packed rows, head computed at trained positions only.

PackedBatch ─▶ text tower (packed attention) ─▶ hidden [T, H] ─▶ select token_index ─▶ head ─▶ per-term outputs [N]
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from trainers import attention, checkpointing, lora, norm_kernels, rope, rotation_kernels, tiled_mlp
from trainers.batch import PackedBatch
from trainers.config import TrainerConfig
from trainers.distributed import Ranks, shard
from trainers.errors import ConfigError
from trainers.head import HeadOutputs, token_logprobs
from trainers.packing import pack_row
from trainers.references import resolve
from trainers.sequence_parallel import gather_terms
from trainers.text_part import freeze_other_parts, has_other_parts, text_tower
from trainers.types import PackedRow, Sample

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """Wraps the model so that one forward gives the per-term outputs; under FSDP this is the root module."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, batch: PackedBatch, temperature: float | None = None) -> HeadOutputs:
        """The head's outputs for the batch's loss terms, its `top_ids` and candidate sets; N may be 0.

        Where ranks share a row, each gets the outputs of all its terms, of which its own carry a gradient.
        """
        hidden = text_tower(self.model)(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            packed_layout=batch.layout,
            use_cache=False,
        ).last_hidden_state
        head: Any = self.model.get_output_embeddings()
        outputs = token_logprobs(
            hidden.squeeze(0).index_select(0, batch.token_index),
            head.weight,
            batch.targets,
            bias=head.bias,
            temperature=self.temperature if temperature is None else temperature,
            softcap=self.softcap,
            # A teacher's logits may be padded further than the model's: what it says of those ids is of no token.
            top_ids=batch.top_ids.masked_fill(batch.top_ids >= len(head.weight), -1),
            candidates=batch.candidates,
        )
        if batch.own_terms is None or batch.layout.sequence is None:
            return outputs
        return gather_terms(outputs, batch.own_terms, batch.terms, batch.layout.sequence)


def load_model(config: TrainerConfig, source: str | None = None) -> PreTrainedModel:
    """The model in `config.dtype`, from `source` (a checkpoint) or `config.model`, set to run packed rows.

    With `config.peft` always from `config.model`: a checkpoint holds the adapter alone.

    Raises:
        ConfigError: the model cannot be loaded, or has layers packed rows cannot run.
    """
    kwargs = resolve(config.model_init_kwargs or {})
    kwargs.setdefault("dtype", config.dtype)
    if config.trust_remote_code:
        kwargs["trust_remote_code"] = True
    name = config.model if source is None or config.peft is not None else source
    scaling = getattr(config, "rope_parameters", None)
    if (Path(name) / "adapter_config.json").is_file():
        raise ConfigError(
            f"model {name!r} is an adapter: set model to what it was trained on, or merge the two first with "
            f"`python -m trainers.export {name} FOLDER --merge`"
        )
    try:
        if scaling is not None:
            own = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
            kwargs["rope_parameters"] = rope.complete(own, scaling, getattr(config, "max_length", 0))
        return from_pretrained(name, attn_implementation=attention.NAME, **kwargs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {error}") from error


def from_pretrained(name: str, **kwargs: Any) -> Any:
    """A causal language model, or one that sees images too. Raises `OSError` or `ValueError`."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        try:
            return AutoModelForImageTextToText.from_pretrained(name, **kwargs)
        except ValueError:
            raise error from None


def build_policy(model: PreTrainedModel, config: TrainerConfig, ranks: Ranks, longest: int | None = None) -> Policy:
    """Check the model, put the adapter in, switch gradient checkpointing on, move it to the device and shard it.

    Args:
        model: float32 or float64 parameters are kept as master weights; bfloat16 compute comes from the precision policy.
        longest: most tokens a sequence may have, if known.

    Raises:
        ConfigError: the model does something that packed rows or our head would compute otherwise.
    """
    lora.refuse_quantised(model)
    unscaled = rope.beyond(model.config, longest) if longest and hasattr(config, "rope_parameters") else None
    if unscaled and ranks.is_main:
        logger.warning(unscaled)
    if ranks.sequence is not None:
        attention.check_shared(model, ranks.sequence, longest)
    attention.check_supported(model, longest)
    freeze_other_parts(model)
    if config.peft is not None and not lora.is_attached(model):
        text = text_tower(model) if has_other_parts(model) else None
        lora.attach(model, config.peft, config.model, config.seed, text)
    policy = Policy(model, config.loss_temperature).to(ranks.device)
    if ranks.device.type == "cuda":
        for kernels in (norm_kernels, rotation_kernels):
            if kernels.works(ranks.device):
                kernels.enable(model)
    _check_head(policy, ranks.device)
    model.train()
    names = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if config.mlp_tile_tokens is not None:
        tiled_mlp.enable(model, layers, config.mlp_tile_tokens)
    if config.gradient_checkpointing:
        kwargs = config.gradient_checkpointing_kwargs or {}
        if kwargs.get("offload") and (tokens := config.token_budget or longest):
            width = (compute_dtype(config, ranks.device) or model.dtype).itemsize
            own = -(-tokens // ranks.place_size)
            checkpointing.check_host_memory(model, own, width, config.save_attention, ranks.local_world_size)
        checkpointing.enable(model, kwargs=kwargs, save_attention=config.save_attention)
    if ranks.mesh is not None:
        shard(policy, layers, ranks.mesh, compute_dtype=compute_dtype(config, ranks.device))
    return policy


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype | None:
    """bfloat16 under mixed precision, else None (parameters' own type)."""
    return torch.bfloat16 if (config.bf16 if config.bf16 is not None else device.type == "cuda") else None


@torch.no_grad()
def _check_head(policy: Policy, device: torch.device) -> None:
    """Compare with the model's own logits on a few tokens: an unusual head is refused, not trained wrongly."""
    model = policy.model
    was_training = model.training
    model.eval()
    tokens = np.arange(8, dtype=np.int32) % model.config.get_text_config().vocab_size
    batch = PackedBatch.from_row(probe_row(tokens), device)
    ours = policy(batch, temperature=1.0)[0]
    logits = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, packed_layout=batch.layout, use_cache=False
    ).logits
    theirs = logits[0].to(ours.dtype).log_softmax(-1)[batch.token_index, batch.targets]
    model.train(was_training)
    difference = (ours - theirs).abs().max().item()
    low_precision = model.dtype in (torch.bfloat16, torch.float16)
    if not difference < (0.1 if low_precision else 2e-3):
        raise ConfigError(
            f"{type(model).__name__} computes its logits in a way this trainer does not know: log-probabilities differ by "
            f"{difference:.3g}"
        )


def probe_row(tokens: np.ndarray) -> PackedRow:
    """One sequence whose every token but the first is a loss term; advantages and sampler logprobs 0."""
    mask = np.arange(len(tokens)) > 0
    versions = np.where(mask, 0, -1).astype(np.int32)
    return pack_row([Sample("probe", tokens.astype(np.int32), mask, np.zeros(len(tokens), np.float32), 0.0, 0, versions)])


@torch.no_grad()
def probe_logprobs(policy: Policy, tokens: np.ndarray, device: torch.device) -> np.ndarray:
    """float64 [len(tokens) − 1]: log-probability of each token but the first at temperature 1. A collective when sharded."""
    training = policy.training
    policy.eval()
    logprobs = policy(PackedBatch.from_row(probe_row(tokens), device), temperature=1.0)[0]
    policy.train(training)
    return logprobs.double().cpu().numpy()


def gathered_parameters(model: PreTrainedModel, dtype: torch.dtype | None, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole CPU tensor) of every parameter, tied ones once, in the same order on every rank: a collective when sharded.
    Names are the plain model's: an adapter is merged into the tensors it adapts.

    Args:
        dtype: type of floating-point tensors handed out; None: their own.
        keep: False on the ranks that only take part in the gather; they get empty tensors.
    """
    for name, served in lora.served_parameters(model).items():
        whole = served.whole(served.dtype)
        if not keep:
            yield name, torch.empty(0)
            continue
        if dtype is not None and whole.is_floating_point():
            whole = whole.to(dtype)
        yield name, whole.to("cpu", copy=True).contiguous()


def export_state(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameter names and layouts as the model's checkpoints have them (mixture-of-experts layers are fused in memory)."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def save_hf(model: PreTrainedModel, state: dict[str, torch.Tensor], directory: Any, dtype: torch.dtype) -> None:
    """Write config and safetensors of `state` (whole tensors of type `dtype`, names as in memory)."""
    config = copy.deepcopy(model.config)
    model.save_pretrained(directory, state_dict=state)
    # save_pretrained records the type of the parameters in memory, which under mixed precision is not that of the files.
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
