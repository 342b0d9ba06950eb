"""The base of every configuration model: unknown fields are refused, groups of fields may be nested."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

# A group of fields may also be written nested (`optim: {learning_rate: …}` or `optim.learning_rate=…`).
SECTIONS: dict[str, tuple[str, ...]] = {
    "optim": (
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "optim_args",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
    ),
}


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def unknown(name: str, known: Iterable[str], what: str) -> str:
    """What to say of a name that is none of `known`."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"unknown {what}: " + (f"did you mean `{near[0]}`?" if near else "known fields: " + ", ".join(names))


def number_fields(schema: dict[str, Any]) -> None:
    """`json_schema_extra`: what Prefect's run form needs beside what pydantic says.

    It shows a group's fields in the order of `position`, and forgets a field's bounds unless they stand in `allOf` too.
    """
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position
        if bounds := {name: field[name] for name in BOUNDS if name in field}:
            field["allOf"] = [bounds]


class StrictModel(BaseModel):
    """Refuses unknown fields and names the nearest known one. In the run form a field is called what it is called in a file."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, json_schema_extra=number_fields, field_title_generator=lambda name, _: name
    )

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = cls._flatten_sections(data)
        for name in data:
            reason = cls.refusal(str(name))
            if reason:
                raise ValueError(reason)
        return data

    @classmethod
    def refusal(cls, name: str) -> str | None:
        """Why a field called `name` may not be written here; None if it may. Subclasses add names of their own."""
        if name in cls.model_fields:
            return None
        return unknown(name, cls.model_fields, f"field `{name}` in {cls.__name__}")

    @classmethod
    def _flatten_sections(cls, data: dict[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in data.items():
            if isinstance(value, dict) and name in SECTIONS and SECTIONS[name][0] in cls.model_fields:
                wrong = [key for key in value if key not in SECTIONS[name]]
                if wrong:
                    raise ValueError(f"unknown field `{name}.{wrong[0]}`: {name} has {', '.join(SECTIONS[name])}")
                flat.update(value)
            else:
                flat[name] = value
        return flat
