"""What of a run config becomes MLflow params, so that two runs of a kind have the same keys and differ where their configs do.

Left out is what names or attends to a run without changing what is computed: name, folders, addresses, retries, limits,
loggers. What one looks for among runs is a tag (`infra.tracking_tags`).
"""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import BaseModel

from flows.config import RunConfig
from flows.config_servers import ServerConfig
from infra.tracking_params import without_secrets

IDENTITY = (
    "name",
    "tags",
    "sweep",
    "output_dir",
    "storage",
    "tracking",
    "retry",
    "limits",
    "report_to",
    "vllm_server_base_url",
    "teacher_server_urls",
)
_ADDRESSES = ("url", "api_key_env", "python", "env")  # of a server: where it is, not what it does


def params_of(config: RunConfig) -> dict[str, Any]:
    """Leaves by dotted name. A group that is not set has all its leaves, as None; a mapping is one leaf."""
    return dict(_leaves(type(config), config, ""))


def _leaves(model: type[BaseModel], value: BaseModel | None, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        if (not prefix and name in IDENTITY) or (prefix.startswith("servers.") and name in _ADDRESSES):
            continue
        item = None if value is None else getattr(value, name)
        group = _group(field.annotation)
        if group is not None and (item is None or isinstance(item, group)):
            found += _leaves(group, item, f"{prefix}{name}.")
        else:
            found.append((prefix + name, _plain(item, name)))
    return found


def _group(annotation: Any) -> type[BaseModel] | None:
    """The one model that a field holds, if it holds one; a list of models is a leaf."""
    models = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type) and issubclass(part, BaseModel)]
    return models[0] if len(models) == 1 else None


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict) and any(isinstance(item, ServerConfig) for item in value.values()):
        value = {key: item.model_dump(mode="json", exclude=set(_ADDRESSES)) for key, item in value.items()}
    # A mapping's keys differ from run to run: one param for all of it.
    return json.dumps(without_secrets({name: value})[name], sort_keys=True) if isinstance(value, dict) else value
