"""A run's place in shared storage, as flow, trainer and command line are told of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.storage.base import Options, open_storage
from infra.storage.checkpoints import CheckpointStore
from infra.storage.resume import newest_whole
from infra.storage.uploads import OnEvent, Uploads

MIRROR = (sys.executable, "-m", "trainers.main", "--mirror")
CHECK_S = 10.0


@dataclass(frozen=True)
class RunStorage:
    """JSON-ready by `dataclasses.asdict`; holds no secrets.

    Args:
        uri: of the run: its checkpoints lie directly below it. None: in the run's folder only.
        keep: fields of the retention rule beside how many newest are kept.
        wait_s: how long the end of a training waits for the last upload.
    """

    uri: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    keep: dict[str, Any] = field(default_factory=dict)
    wait_s: float = 600.0

    def store(self) -> CheckpointStore:
        assert self.uri is not None, "a run without shared storage has no store"
        return CheckpointStore(open_storage(self.uri, Options(**self.options)))

    def quick_check(self) -> None:
        """Raises `StorageError` in seconds if checkpoints could not be written there now."""
        patience = {"timeout_s": min(CHECK_S, self.options.get("timeout_s", CHECK_S)), "attempts": 2}
        open_storage(str(self.uri), Options(**{**self.options, **patience})).check()

    def newest_whole(self, folder: Path, fault: Callable[[Path], str | None]) -> Path | None:
        """See `infra.storage.resume.newest_whole`."""
        return newest_whole(folder, self.store(), fault)

    def uploads(self, folder: Path, last: int | None, on_event: OnEvent = lambda event: None) -> Uploads:
        """The mirror of `folder`, started. Args: last: newest checkpoints to keep."""
        assert self.uri is not None, "a run without shared storage has no mirror"
        return Uploads(folder, self.uri, self.options, {"last": last, **self.keep}, MIRROR, on_event)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
