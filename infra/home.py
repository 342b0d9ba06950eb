"""The Loopwright home: where a machine's registry, MLflow and Prefect data, runs, server logs and locks live.

`LOOPWRIGHT_HOME` names it; default `~/.loopwright`.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The home as an absolute path, created (mode 0700: it holds run configs and logs) if it is not there yet."""
    path = Path(os.environ.get("LOOPWRIGHT_HOME") or "~/.loopwright").expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
