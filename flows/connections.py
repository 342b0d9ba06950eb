"""What is up on this machine and how its processes reach it: addresses from `up.json`, keys from `keys.json`.

    loopwright up ──writes──▶ up.json ──▶ running() ──▶ client_environment() ─▶ `loopwright …` commands, worker, flows

What the environment names already (PREFECT_API_URL, MLFLOW_TRACKING_URI) wins. Imports little: every command passes here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.home import home
from infra.keys import read_keys
from infra.process import alive


@dataclass(frozen=True)
class Up:
    """Contents of up.json. `prefect_port`, None: a Prefect server elsewhere. `tracked`: clients use MLflow's server, not the
    store behind it, because the store is a database or shared with other machines."""

    pid: int
    start_time: float
    prefect_port: int | None
    prefect_url: str
    mlflow_url: str | None
    worker: str
    host: str = "127.0.0.1"
    shared: bool = False
    tracked: bool = False

    @property
    def prefect_ui(self) -> str:
        return self.prefect_url.removesuffix("/api")


def up_file() -> Path:
    return home() / "up.json"


def running() -> Up | None:
    """What is up on this machine, None if nothing is."""
    up = last()
    return up if up is not None and alive(up.pid, up.start_time) else None


def last() -> Up | None:
    """What is up, or was when it was killed: an orderly end leaves nothing."""
    try:
        return Up(**json.loads(up_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def client_environment(up: Up, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process on this machine needs beside Prefect's address to use what is up: MLflow's address, both keys.

    Raises:
        InfraError: the keys cannot be read.
    """
    found: dict[str, str] = {}
    keys = read_keys().client_environment() if up.shared else {}
    if up.prefect_port is not None and environ.get("PREFECT_API_URL", up.prefect_url) == up.prefect_url:
        found |= {name: value for name, value in keys.items() if name.startswith("PREFECT_")}
    if up.tracked and up.mlflow_url and environ.get("MLFLOW_TRACKING_URI", up.mlflow_url) == up.mlflow_url:
        found |= {"MLFLOW_TRACKING_URI": up.mlflow_url}
        found |= {name: value for name, value in keys.items() if name.startswith("MLFLOW_")}
    return found


def connect() -> None:
    """Give this process, and those it starts, what `client_environment` says."""
    up = running()
    if up is not None and (up.shared or up.tracked):
        os.environ.update(client_environment(up))


def prefect_login(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """User and password for a plain HTTP request to Prefect's API; None: it asks for none."""
    user, colon, password = environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
    return (user, password) if colon else None


def mlflow_login(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """The same for MLflow."""
    user = environ.get("MLFLOW_TRACKING_USERNAME")
    return (user, environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None
