"""The part of a model that text goes through: all of it, or the text tower of a model that also sees or hears.

    vision-language model:  tower for images (frozen, never sent) ─╳
                            text tower ─▶ hidden [T, H] ─▶ head                  packed rows of text run through these alone

Positions: a text token has the same index on every axis of a multi-axis rotary embedding, so the packed `position_ids` [1, T]
are right as they are; the check of the head at start compares with the model's own forward.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trainers.errors import ConfigError


def has_other_parts(model: PreTrainedModel) -> bool:
    """Whether the model has towers for anything but text."""
    return model.config.get_text_config() is not model.config


def text_tower(model: PreTrainedModel) -> nn.Module:
    """What makes hidden states of token ids.

    Raises:
        ConfigError: it cannot be told apart from the rest of the model.
    """
    if not has_other_parts(model):
        return model.base_model
    tower: Any = model.get_decoder()
    if tower is None or tower is model or getattr(tower, "config", None) is not model.config.get_text_config():
        raise ConfigError(
            f"{type(model).__name__} has no text tower of its own (get_decoder() gives {type(tower).__name__}): it cannot be "
            "trained on text alone. Train its text-only sibling, if there is one"
        )
    if getattr(tower.config, "cross_attention_layers", None):
        raise ConfigError(
            f"{type(model).__name__} attends to images inside its text layers: packed rows of text cannot run them"
        )
    return tower


def outside_text(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that text does not go through. An adapter's are always inside."""
    if not has_other_parts(model):
        return set()
    inside = {id(parameter) for parameter in text_tower(model).parameters()}
    head = model.get_output_embeddings()
    inside |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) not in inside}


def freeze_other_parts(model: PreTrainedModel) -> None:
    """Nothing outside the text part is trained: no gradients, no optimizer state."""
    parameters = dict(model.named_parameters())
    for name in outside_text(model):
        parameters[name].requires_grad_(False)
