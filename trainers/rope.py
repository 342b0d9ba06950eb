"""Rotary position scaling for sequences beyond the window a model was trained on: what YaRN (arXiv:2309.00071) is told.

    rope_parameters: {rope_type: yarn, factor: auto} ─┐
    the model's own config.json ──────────────────────┴▶ complete parameters ─▶ `from_pretrained(rope_parameters=…)`

`rope_theta` is the model's: what it learnt of positions holds for that base alone.
"""

from __future__ import annotations

from typing import Any

from trainers.errors import ConfigError

SCALED = ("yarn", "linear", "dynamic")  # types that have a `factor`


def beyond(model_config: Any, longest: int) -> str | None:
    """What to say where sequences of `longest` tokens leave the trained window and nothing scales their positions."""
    text = model_config.get_text_config()
    own, trained = getattr(text, "rope_parameters", None) or {}, getattr(text, "max_position_embeddings", None) or longest
    if own.get("rope_type") != "default" or longest <= trained:
        return None
    return (
        f"max_length={longest}: the model was trained for {trained} positions, and nothing scales those beyond; set "
        "rope_parameters={rope_type: yarn, factor: auto}, or look at loss_by_position"
    )


def complete(model_config: Any, given: dict[str, Any], longest: int) -> dict[str, Any]:
    """`given` with what it leaves out: the base and the trained window from the model, the factor from the longest sequence.

    Args:
        model_config: transformers' configuration of the model.
        given: `rope_type`, and perhaps `factor` (a number, or "auto"), `original_max_position_embeddings`, `rope_theta` and
            what else transformers takes for that type.
        longest: tokens of the longest sequence.

    Raises:
        ConfigError: another `rope_theta` than the model's, a factor too small for `longest`, or a type without a name.
    """
    text = model_config.get_text_config()
    own = dict(getattr(text, "rope_parameters", None) or {})
    if own and all(isinstance(value, dict) for value in own.values()):
        raise ConfigError(
            f"rope_parameters: {type(text).__name__} has other ones for each kind of layer; they cannot be set at once"
        )
    kind = given.get("rope_type")
    if not kind:
        raise ConfigError("rope_parameters has no rope_type: write {rope_type: yarn, factor: auto}")
    theta = own.get("rope_theta")
    if theta is not None and given.get("rope_theta", theta) != theta:
        raise ConfigError(
            f"rope_parameters.rope_theta is {given['rope_theta']:g}, and the model was trained with {theta:g}: leave it "
            "out, it is read from the model"
        )
    made = {"rope_theta": theta, **given} if theta is not None else dict(given)
    if kind not in SCALED:
        return made
    trained = given.get("original_max_position_embeddings") or own.get("original_max_position_embeddings")
    trained = trained or text.max_position_embeddings
    factor = given.get("factor", "auto")
    if factor == "auto":
        factor = max(1.0, longest / trained)
    elif factor * trained < longest:
        raise ConfigError(
            f"rope_parameters: factor {factor:g} × {trained} trained positions is {factor * trained:g}, and sequences have up "
            f"to {longest} tokens: set factor to {longest / trained:g} or more, or to auto"
        )
    return made | {"factor": float(factor), "original_max_position_embeddings": int(trained)}
