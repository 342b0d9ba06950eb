"""How a run config's JSON schema is laid out: what people set most comes first in the run form and in `docs/config.md`.

Prefect's page sorts the fields of every group by `position`; their order in the schema alone is lost in a Postgres database.
"""

from __future__ import annotations

from typing import Any

from trainers.config_base import number_fields

# Everything that is not named here follows, in its order of declaration.
FIRST = (
    # what to run
    "name", "model", "dataset", "reward_funcs", "reward_weights", "eval",
    # how long, and how large a step is
    "max_steps", "num_train_epochs", "learning_rate", "max_length", "num_generations", "max_completion_length", "temperature",
    "per_device_train_batch_size", "gradient_accumulation_steps", "token_budget",
    # what is trained
    "peft", "dtype", "bf16",
    # on what machine, and what is kept
    "servers", "trainer", "save_steps", "save_total_limit", "storage", "tracking", "tags", "limits", "retry",
)  # fmt: skip


def lay_out(schema: dict[str, Any]) -> None:
    """`json_schema_extra` of a run config: order and number its fields. The constant `type` comes last."""
    properties = schema.get("properties", {})
    rank = {name: index for index, name in enumerate(FIRST)}
    ordered = sorted(properties, key=lambda name: len(FIRST) + 1 if name == "type" else rank.get(name, len(FIRST)))
    schema["properties"] = {name: properties[name] for name in ordered}
    number_fields(schema)
