"""`${oc.env:NAME}` references (OmegaConf's notation): a config names a secret, the environment holds it.

A config keeps its references as written wherever it is shown or stored; only the code that uses a value resolves it, and
what it resolved goes nowhere else. `${oc.env:NAME,default}` falls back to the text after the comma.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainers.errors import ConfigError

REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)(?:,([^}]*))?\}")
_ANY = re.compile(r"\$\{[^}]*\}?")


def resolve(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """`value` with every reference in its strings replaced; dictionaries and lists are walked and copied.

    Raises:
        ConfigError: a named variable is not set, or the reference is of a kind that is not supported.
    """
    if isinstance(value, dict):
        return {key: resolve(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve(item, environ) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    for problem in problems(value, environ):
        raise ConfigError(problem)
    return REFERENCE.sub(lambda match: environ.get(match[1], match[2] or ""), value)


def problems(text: str, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What keeps the references in `text` from being resolved, one message each."""
    for match in REFERENCE.finditer(text):
        if match[1] not in environ and match[2] is None:
            yield f"the environment variable {match[1]} is not set, which `{match[0]}` needs"
    for match in _ANY.finditer(REFERENCE.sub("", text)):
        yield f"`{match[0]}` is not a reference; write ${{oc.env:NAME}} or ${{oc.env:NAME,default}}"


def is_reference(value: Any) -> bool:
    return isinstance(value, str) and REFERENCE.search(value) is not None
