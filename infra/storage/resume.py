"""Which checkpoint a run goes on from: the newest whole one of its folder and shared storage.

for every step, newest first:   in the folder and whole ─▶ it
                                else in storage ─▶ fetched, hashed while it is read ─▶ it
                                else a warning that names the fault, and the next older one
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from infra.errors import Damaged, NotStored, StorageError
from infra.storage.checkpoints import FETCHING, MANIFEST, PREFIX, CheckpointStore, Listed, local_folders

logger = logging.getLogger(__name__)
SAID_EVERY_S = 10.0


def newest_whole(folder: Path, store: CheckpointStore, fault: Callable[[Path], str | None]) -> Path | None:
    """Its folder below `folder`; None: there is none anywhere.

    Args:
        fault: what keeps a local checkpoint from being whole, every file hashed; None: nothing.

    Raises:
        StorageError: storage is out of reach and `folder` holds nothing whole: a run must not begin anew because of that.
            Or it holds a newer one that cannot be fetched for want of a connection or of room.
    """
    local = dict(local_folders(folder))
    remote: dict[int, Listed] = {}
    unreachable: StorageError | None = None
    try:
        remote = store.listed()
    except StorageError as error:
        unreachable = error
    for step in sorted({*local, *remote}, reverse=True):
        if step in local:
            if (why := fault(local[step])) is None:
                if unreachable is not None:
                    logger.warning("shared storage cannot be looked at, going on from %s: %s", local[step], unreachable)
                return local[step]
            logger.warning("checkpoint %s is not whole (%s)", local[step], why)
        if step in remote:
            try:
                return _fetched(folder / f"{PREFIX}{step}", store, remote[step])
            except (Damaged, NotStored) as error:
                logger.warning("checkpoint %s is not whole (%s)", store.uri(step), error)
        logger.warning("step %d: falling back to an older checkpoint", step)
    if unreachable is not None:
        raise unreachable
    for leftover in folder.glob(f"{FETCHING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return None


def _fetched(target: Path, store: CheckpointStore, entry: Listed) -> Path:
    if (fault := entry.fault) is not None:
        raise Damaged(fault)
    began = said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            logger.info("fetching %s: %s of %s bytes", store.uri(entry.step), f"{done:,}", f"{total:,}")

    temporary = target.with_name(f"{FETCHING}{target.name}")
    for other in target.parent.glob(f"{FETCHING}*"):
        if other != temporary:  # of an older start that was meant to go on from another checkpoint
            shutil.rmtree(other, ignore_errors=True)
    if target.exists():
        # What is good of the damaged one need not be fetched again.
        try:
            (target / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            target.rename(temporary)
        except OSError as error:
            raise StorageError(f"{target} cannot be replaced: {error.strerror or error}") from error
    store.fetch(entry, target, progress)
    logger.info("fetched %s in %.1f s", store.uri(entry.step), time.monotonic() - began)
    return target
