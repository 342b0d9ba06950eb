"""The files of a snapshot: `rollout_state.json`, and `rollout_buffer.npz` where samples are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainers.errors import ConfigError, DatasetError
from trainers.rollouts.buffer import write_buffer
from trainers.rollouts.ledger import FORMAT
from trainers.step_source import BUFFER_FILE, STATE_FILE


def write_snapshot(directory: Path, state: dict[str, Any], arrays: dict[str, np.ndarray] | None) -> None:
    """Write a snapshot's files. The caller makes the folder's appearance atomic."""
    directory.mkdir(parents=True, exist_ok=True)
    if arrays is not None:
        write_buffer(directory / BUFFER_FILE, arrays)
    (directory / STATE_FILE).write_text(json.dumps(state, indent=1))


def read_state(directory: Path, source: str, fingerprint: str, allow_change: bool) -> dict[str, Any] | None:
    """The state of a snapshot; None if the data changed and that is allowed: positions of other data say nothing.

    Args:
        source, fingerprint: of the data as it is now.

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
            f"{source} changed: its fingerprint is {fingerprint}, the checkpoint's is {state['fingerprint']}. "
            "Restore the data, or set allow_dataset_change=true to begin anew with this one"
        )
    return None
