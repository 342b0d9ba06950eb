"""The base of every configuration model: unknown fields are refused, groups of fields may be nested."""

from __future__ import annotations

import difflib
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


class StrictModel(BaseModel):
    """Refuses unknown fields and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

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
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "known fields: " + ", ".join(sorted(cls.model_fields))
        return f"unknown field `{name}` in {cls.__name__}: {hint}"

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
