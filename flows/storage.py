"""What a flow does with shared storage: the rest of the upload at its end, and whose checkpoints lie there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from infra.errors import StorageError
from infra.storage.checkpoints import PREFIX
from infra.storage.run_storage import RunStorage

FAILED_WAIT_S = 120.0  # a run that failed anyway does not wait as long as one that is done


def upload_rest(config: RunConfig, folder: Path, timeout_s: float | None = None) -> str | None:
    """Store what the trainer could not; why that failed, None: everything is stored.

    Args:
        timeout_s: default: `storage.upload_wait_s`.
    """
    storage = config.storage.of_run(folder.name)
    if storage.uri is None:
        return None
    uploads = storage.uploads(folder, config.save_total_limit)
    if uploads.finish(storage.wait_s if timeout_s is None else timeout_s):
        return None
    return f"the newest checkpoint is in {folder}, but not in {storage.uri}: {uploads.failing}"


def stored_config(storage: RunStorage) -> dict[str, Any] | None:
    """The trainer's config in the newest checkpoint in shared storage; None: there is none that can be read.

    Raises:
        StorageError: the storage cannot be looked at.
    """
    if storage.uri is None:
        return None
    store = storage.store()
    for step, entry in reversed(store.listed().items()):
        if entry.fault is None:
            try:
                return json.loads(store.storage.get_bytes(f"{PREFIX}{step}/loopwright_config.json"))
            except (StorageError, ValueError):
                continue
    return None
