"""Weights to the servers through a file both sides can read (`/dev/shm` where it is large enough).

    staged buckets ─▶ one safetensors file ─▶ every server at once: update {path}

The file is whole before a server is paused, so the pause lasts as long as the server's load.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainers.errors import WeightSyncError
from trainers.tensor_file import save_tensors
from trainers.weight_sync.layout import Layout
from trainers.weight_sync.members import Member, each
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.ways import Results, connect, introduce, update_member

PREFIX = "loopwright-weights-"


def sweep(base: Path) -> None:
    """Remove weight folders whose process was killed: in `/dev/shm` they hold memory. Those of the last minute stay."""
    for folder in base.glob(PREFIX + "*"):
        try:
            if time.time() - folder.stat().st_mtime < 60:
                continue
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


class WeightFiles:
    """A private folder for update files, made at the first one. `output_dir`: used where memory-backed files do not fit."""

    def __init__(self, output_dir: str) -> None:
        self.output_dir = output_dir
        self.directory: Path | None = None
        self._lock = -1  # open descriptor of the folder, while there is one

    def folder(self, needed: int) -> Path:
        """With room for `needed` bytes twice."""
        if self.directory is None:
            allowed = os.environ.get("LOOPWRIGHT_WEIGHT_DIRS", "").split(os.pathsep)[0]
            base = Path(allowed) if allowed else Path("/dev/shm")
            if not allowed and not (base.is_dir() and os.access(base, os.W_OK) and shutil.disk_usage(base).free > 2 * needed):
                base = Path(self.output_dir)
            base.mkdir(parents=True, exist_ok=True)
            sweep(base)
            self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base.resolve()))
            # Held until this process ends, however it ends: a folder that can be locked has no owner.
            self._lock = os.open(self.directory, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self.directory

    def send(
        self,
        members: Sequence[Member],
        name: str,
        tensors: dict[str, torch.Tensor],
        info: dict[str, Any],
        version: int,
        layout: Layout | None,
    ) -> tuple[Results, int]:
        """A file for as long as the members load from it, and its tensors' bytes. `layout`: what they must know to read it.

        Raises:
            WeightSyncError: it could not be written.
        """
        path, size = self._write(name, tensors)
        channel = str(self.directory)

        def one(member: Member) -> Seconds:
            connect(member, channel, {"transport": "file", "directory": channel})
            if layout is not None:
                introduce(member, layout)
            return update_member(member, info | {"path": str(path)}, version)

        try:
            return each(members, one), size
        finally:
            path.unlink(missing_ok=True)

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> tuple[Path, int]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            path = self.folder(size) / f"{name}.safetensors"
            save_tensors(tensors, path)
        except OSError as error:
            raise WeightSyncError(f"weights ({name}) could not be written: {error}") from error
        return path, size

    def close(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self.directory = None


class SharedStorage:
    """Way `shared_storage`."""

    name: ClassVar[str] = "shared_storage"
    on_host: ClassVar[bool] = True
    every_rank: ClassVar[bool] = False

    def __init__(self, output_dir: str) -> None:
        self.files = WeightFiles(output_dir)
        self.bytes_sent = 0

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """See `Way.send`."""
        layout = staging.layout
        assert layout is not None, "nothing is staged"
        needed = layout if layout.partial else None
        info = {"layout": layout.id} if layout.partial else {}
        tensors = layout.views(staging.buckets)
        results, self.bytes_sent = self.files.send(members, f"policy-{version}", tensors, info, version, needed)
        return results

    def close(self) -> None:
        self.files.close()
