"""Whole checkpoints in any storage: the same layout as in a run's folder.

    <address>/checkpoint-<step>/…files…, manifest.json last, PINNED by hand

Invariants:
- a manifest is written after all files of its checkpoint are there, and is the first to go: what a kill leaves is not whole;
- what is fetched is made beside its place and appears by rename, every file hashed while it was read;
- nothing but what lies here is needed to read a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from infra.errors import Damaged, NotStored, StorageError
from infra.storage.base import Storage, Stored, file_sha256

PREFIX, MANIFEST, PINNED = "checkpoint-", "manifest.json", "PINNED"
FETCHING = ".fetch-"
FILES_AT_A_TIME = 4

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class File:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is made of."""

    step: int
    files: dict[str, File]
    metrics: dict[str, float]
    text: bytes

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @classmethod
    def parse(cls, text: bytes, where: str) -> Manifest:
        """Raises `Damaged`."""
        try:
            data = json.loads(text)
            files = {str(name): File(int(entry["bytes"]), str(entry["sha256"])) for name, entry in data["files"].items()}
            metrics = {str(name): float(value) for name, value in data.get("metrics", {}).items()}
            step = int(data["step"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{where}: no readable {MANIFEST} ({type(error).__name__})") from error
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise Damaged(f"{where}: {MANIFEST} names {name!r}, which lies outside of the checkpoint")
        return cls(step, files, metrics, text)


@dataclass(slots=True)
class Listed:
    """A checkpoint as a listing shows it; `manifest` None: there is none, or none that can be read, as `why` says."""

    step: int
    files: dict[str, Stored] = field(default_factory=dict)  # by name within the checkpoint
    manifest: Manifest | None = None
    why: str = f"no readable {MANIFEST}"

    @property
    def pinned(self) -> bool:
        return PINNED in self.files

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.manifest.metrics if self.manifest else {}

    @property
    def fault(self) -> str | None:
        """What a listing alone tells: a file that is missing, or has another size. None says nothing of the content."""
        if self.manifest is None:
            return self.why
        for name, file in self.manifest.files.items():
            there = self.files.get(name)
            if there is None:
                return f"{name} is missing"
            if there.size != file.size:
                return f"{name} has {there.size} bytes, the manifest says {file.size}"
        return None


class CheckpointStore:
    """The checkpoints below a storage's address. Thread-safe; every method may raise `StorageError`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._manifests: dict[int, tuple[str, Manifest]] = {}  # by step, with the tag it was read at

    def uri(self, step: int) -> str:
        return f"{self.storage.uri}/{PREFIX}{step}"

    def listed(self) -> dict[int, Listed]:
        """By step, oldest first: everything named like a checkpoint, whole or not."""
        found: dict[int, Listed] = {}
        for key, stored in self.storage.list(PREFIX).items():
            folder, _, name = key.partition("/")
            with contextlib.suppress(ValueError):
                step = int(folder[len(PREFIX) :])
                if name:
                    found.setdefault(step, Listed(step)).files[name] = stored
        for step, entry in found.items():
            if MANIFEST in entry.files:
                try:
                    entry.manifest = self._manifest(step, entry.files[MANIFEST].tag)
                except (Damaged, NotStored) as error:
                    entry.why = str(error)
        return dict(sorted(found.items()))

    def _manifest(self, step: int, tag: str) -> Manifest:
        known = self._manifests.get(step)
        if known is None or known[0] != tag:
            text = self.storage.get_bytes(f"{PREFIX}{step}/{MANIFEST}")
            known = self._manifests[step] = (tag, Manifest.parse(text, self.uri(step)))
        return known[1]

    def verify(self, entry: Listed) -> str | None:
        """What is wrong with a checkpoint, every file read again and hashed; None: it is whole."""
        if (fault := entry.fault) is not None or entry.manifest is None:
            return fault
        for name, file in entry.manifest.files.items():
            try:
                if self.storage.sha256(f"{PREFIX}{entry.step}/{name}") != file.sha256:
                    return f"{name} differs from its SHA-256"
            except (Damaged, NotStored) as error:
                return str(error)
        return None

    def upload(self, step: int, folder: Path, progress: Progress = lambda done, total: None) -> Manifest:
        """Store the checkpoint in `folder`: files first, the manifest last. Goes on from what an earlier try has sent.

        Raises:
            Damaged: the folder is not what its manifest says.
            NotStored: it is gone, or has no manifest.
        """
        try:
            manifest = Manifest.parse((folder / MANIFEST).read_bytes(), str(folder))
        except OSError as error:
            raise NotStored(f"{folder} cannot be read: {error.strerror}") from error
        base = f"{PREFIX}{step}"
        # An older checkpoint of this step would look whole while its files are replaced one by one.
        self.storage.delete([f"{base}/{MANIFEST}"])

        def send(name: str, file: File) -> None:
            try:
                self.storage.put(f"{base}/{name}", folder / name, file.sha256)
            except OSError as error:
                raise NotStored(f"{folder / name} cannot be read: {error.strerror}") from error

        _each(manifest, send, progress)
        there = {key.removeprefix(f"{base}/"): stored for key, stored in self.storage.list(f"{base}/").items()}
        if (fault := Listed(step, there, manifest).fault) is not None:
            raise StorageError(f"{self.uri(step)}: after it was stored, {fault}")
        if (folder / PINNED).exists():
            self.pin(step)
        self.storage.put_bytes(f"{base}/{MANIFEST}", manifest.text)
        return manifest

    def fetch(self, entry: Listed, target: Path, progress: Progress = lambda done, total: None) -> None:
        """Make the checkpoint at `target` (its folder), where none is yet. Goes on from what an earlier try has fetched.

        Raises:
            Damaged, NotStored: it is not whole.
            StorageError: the storage is out of reach, or there is no room here.
        """
        if (fault := entry.fault) is not None or entry.manifest is None:
            raise Damaged(f"{self.uri(entry.step)} is not whole: {fault}")
        manifest, temporary = entry.manifest, target.with_name(f"{FETCHING}{target.name}")

        def take(name: str, file: File) -> None:
            path = temporary / name
            if not (path.is_file() and path.stat().st_size == file.size and file_sha256(path) == file.sha256):
                self.storage.get(f"{PREFIX}{entry.step}/{name}", path, file.size, file.sha256)

        try:
            temporary.mkdir(parents=True, exist_ok=True)
            there = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
            free, needed = shutil.disk_usage(temporary).free, manifest.size - there
            if free < needed:
                raise StorageError(f"{target.parent} has {free:,} bytes free, {self.uri(entry.step)} needs {needed:,} more")
            _each(manifest, take, progress)
            for path in [path for path in temporary.rglob("*") if path.is_file()]:
                if str(path.relative_to(temporary)) not in manifest.files:
                    path.unlink()
            if entry.pinned:
                (temporary / PINNED).touch()
            _write_synced(temporary / MANIFEST, manifest.text)
            temporary.rename(target)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error

    def pin(self, step: int) -> None:
        """Retention leaves it alone from now on."""
        self.storage.put_bytes(f"{PREFIX}{step}/{PINNED}", b"")

    def unpin(self, step: int) -> None:
        self.storage.delete([f"{PREFIX}{step}/{PINNED}"])

    def remove(self, entry: Listed) -> None:
        base = f"{PREFIX}{entry.step}"
        if MANIFEST in entry.files:
            self.storage.delete([f"{base}/{MANIFEST}"])
        self.storage.delete([f"{base}/{name}" for name in entry.files])
        self.storage.discard_unfinished(f"{base}/")


def _each(manifest: Manifest, work: Callable[[str, File], None], progress: Progress) -> None:
    """`work` for every file, some at a time, the largest first; the first failure once all have ended."""
    lock, done, total = threading.Lock(), 0, manifest.size
    progress(0, total)
    stop = threading.Event()

    def one(item: tuple[str, File]) -> None:
        nonlocal done
        if stop.is_set():
            return
        try:
            work(*item)
        except BaseException:
            stop.set()
            raise
        with lock:
            done += item[1].size
            progress(done, total)

    with ThreadPoolExecutor(FILES_AT_A_TIME, "checkpoint") as pool:
        list(pool.map(one, sorted(manifest.files.items(), key=lambda item: -item[1].size)))


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def local_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint in a run's folder, newest first."""
    found = []
    for path in folder.glob(PREFIX + "*"):
        with contextlib.suppress(ValueError):
            found.append((int(path.name[len(PREFIX) :]), path))
    yield from sorted(found, reverse=True)
