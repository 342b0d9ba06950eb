"""The files of a snapshot: `rollout_state.json`, `rollout_buffer.npz` where samples are kept, and `rollouts_kept.json` where
rollouts to be looked at were not written down yet."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainers.errors import ConfigError, DatasetError
from trainers.rollouts.buffer import read_buffer, write_buffer
from trainers.rollouts.ledger import FORMAT
from trainers.step_source import BUFFER_FILE, KEPT_FILE, STATE_FILE
from trainers.types import Sample

logger = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """`state` and `kept` are JSON, `buffer` arrays by name; None: samples are not kept."""

    state: dict[str, Any]
    buffer: dict[str, np.ndarray] | None
    kept: list[dict[str, Any]]


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Write a snapshot's files. The caller makes the folder's appearance atomic."""
    directory.mkdir(parents=True, exist_ok=True)
    if snapshot.buffer is not None:
        write_buffer(directory / BUFFER_FILE, snapshot.buffer)
    if snapshot.kept:
        (directory / KEPT_FILE).write_text(json.dumps(snapshot.kept))
    (directory / STATE_FILE).write_text(json.dumps(snapshot.state, indent=1))


def read_kept(directory: Path) -> list[dict[str, Any]]:
    """The rollouts of a snapshot that are still to be written down."""
    file = directory / KEPT_FILE
    return json.loads(file.read_text()) if file.exists() else []


def read_samples(directory: Path, state: dict[str, Any], objective: str) -> list[Sample]:
    """The samples of a snapshot, if they were kept, and for `objective`: what their optional fields are is its matter.

    Raises:
        ConfigError: they were written in another format.
    """
    if not (directory / BUFFER_FILE).exists():
        return []
    kept_for = state.get("objective", "grpo")  # where it is not said, there was no other that generates
    if kept_for != objective:
        logger.warning("samples kept for %s are no samples for %s: their prompts are generated anew", kept_for, objective)
        return []
    return read_buffer(directory / BUFFER_FILE)


def read_state(directory: Path, source: str, fingerprint: str, allow_change: bool, cut_by: str = "") -> dict[str, Any] | None:
    """The state of a snapshot; None if the data changed and that is allowed: positions of other data say nothing.

    Args:
        source, fingerprint: of the data as it is now.
        cut_by: options that its rows are made with, which may be what changed.

    Raises:
        DatasetError: the dataset is not the one of the snapshot.
        ConfigError: the snapshot was written in another format.
    """
    state = json.loads((directory / STATE_FILE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"{directory / STATE_FILE} has format {state.get('format')}, and this version reads format {FORMAT}: resume with "
            "the version that wrote it, or begin a new run from its model"
        )
    if state["fingerprint"] == fingerprint:
        return state
    if not allow_change:
        raise DatasetError(
            f"{source} changed{cut_by and f', or {cut_by} did'}: its fingerprint is {fingerprint}, the checkpoint's is "
            f"{state['fingerprint']}. Restore {'them' if cut_by else 'the data'}, "
            "or set allow_dataset_change=true to begin anew with this one"
        )
    return None
