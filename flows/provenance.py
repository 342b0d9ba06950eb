"""What a run config says of model, data, code and servers, handed to `infra.provenance`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.convert import resolve_model
from infra import provenance
from infra.registry import Registry
from trainers.references import resolve

logger = logging.getLogger(__name__)


def record(registry: Registry, run_id: str, config: RunConfig, folder: Path, attempt: int) -> None:
    """Write the facts of an attempt that is about to start. What cannot be found out costs a warning, never the run."""
    try:
        servers = {row.name: command for row in registry.list_servers(run_id) if (command := _command(row.pid, row.ended_at))}
        provenance.write(folder, attempt, facts_of(config, servers))
    except Exception as error:
        logger.warning("what reproduces attempt %d is not recorded: %s: %s", attempt, type(error).__name__, error)


def facts_of(config: RunConfig, servers: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    """The facts of this moment for a run of `config`."""
    dataset = {"path": resolve(config.dataset.path), "split": config.dataset.split, "max_rows": config.dataset.max_rows}
    stored = config.model_dump(mode="json")
    return provenance.collect(stored, resolve_model(resolve(config.model)), dataset, _code(stored), servers)


def _code(fields: Any) -> Iterator[Path]:
    """Python files that a config names, as `file.py:attribute`."""
    if isinstance(fields, dict):
        for value in fields.values():
            yield from _code(value)
    elif isinstance(fields, list):
        for value in fields:
            yield from _code(value)
    elif isinstance(fields, str):
        file, colon, attribute = fields.rpartition(":")
        if colon and file.endswith(".py") and attribute.isidentifier():
            yield Path(file)


def _command(pid: int | None, ended_at: float | None) -> list[str]:
    """The command line of a server of this machine that lives: its flags, exactly."""
    if pid is None or ended_at is not None:
        return []
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
