"""What of a config may be shown: secrets removed, flattened into MLflow params, long values left to `config.yaml`."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

MAX_PARAM_CHARS = 500  # readable in MLflow's table; the store itself would cut at 6000 without a word
REMOVED = "(removed)"

_SECRET_NAME = re.compile(
    r"(^|_|-|\b)(api_?key|secret(_?access)?(_?key)?|access_?key(_?id)?|private_?key|key|password|passwd|passphrase|token|auth|"
    r"authorization|credentials?)$",
    re.IGNORECASE,
)
_TEXT_TOKEN = re.compile(r"(eos|bos|pad|unk|sep|cls|mask|stop)_token$", re.IGNORECASE)
_USERINFO = re.compile(r"(\w[\w+.\-]*://)[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Whether a field of this name holds a secret: `hub_token`, `AWS_SECRET_ACCESS_KEY`; not `token_budget`, `eos_token`."""
    return bool(_SECRET_NAME.search(name)) and not _TEXT_TOKEN.search(name)


def without_secrets(value: Any) -> Any:
    """A copy with the values of secret fields, and passwords inside URLs, replaced by `(removed)`. None stays None."""
    if isinstance(value, dict):
        return {
            str(key): REMOVED if item is not None and is_secret(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        return _USERINFO.sub(rf"\1{REMOVED}@", value)
    return value


def _shown(name: str, value: Any) -> Any:
    return REMOVED if value is not None and is_secret(name) else without_secrets(value)


def flatten(config: dict[str, Any]) -> dict[str, str]:
    """`{"a": {"b": 1}}` → `{"a.b": "1"}`, without secrets. Lists are JSON; what is longer than `MAX_PARAM_CHARS` says so.

    Names lose what MLflow does not allow in them.
    """
    flat: dict[str, str] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), item)
            return
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        if len(text) > MAX_PARAM_CHARS:
            digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]  # so that runs that differ look different
            text = f"({len(text)} characters, sha256 {digest}: see config.yaml)"
        flat[re.sub(r"[^\w\-. /:]", "_", prefix)[:250]] = text

    visit("", without_secrets(config))
    return flat
