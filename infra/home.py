"""The Loopwright home: where a machine's registry, MLflow and Prefect data, runs, server logs and locks live.

`LOOPWRIGHT_HOME` names it; default `~/.loopwright`.
"""

from __future__ import annotations

import os
from pathlib import Path

from infra.errors import InfraError


def home() -> Path:
    """The home as an absolute path, created (mode 0700: it holds run configs and logs) if it is not there yet."""
    path = Path(os.environ.get("LOOPWRIGHT_HOME") or "~/.loopwright").expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InfraError(f"LOOPWRIGHT_HOME={path} cannot be made: {error.strerror}") from error
    return path
