"""Storage in a folder: an object is a file, which appears by rename."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.errors import Damaged, NotStored, StorageError
from infra.storage.base import Storage, Stored, file_sha256

CHUNK = 1 << 20


class FolderStorage(Storage):
    """See `Storage`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def put(self, key: str, path: Path, sha256: str) -> None:
        with self._errors(key):
            self._copy(path, self.root / key, sha256, str(path))

    def put_bytes(self, key: str, data: bytes) -> None:
        target = self.root / key
        with self._errors(key):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
            temporary.write_bytes(data)
            temporary.replace(target)

    def get(self, key: str, path: Path, size: int, sha256: str) -> None:
        with self._errors(key):
            self._copy(self.root / key, path, sha256, key)

    def get_bytes(self, key: str) -> bytes:
        with self._errors(key):
            return (self.root / key).read_bytes()

    def sha256(self, key: str) -> str:
        with self._errors(key):
            return file_sha256(self.root / key)

    def list(self, prefix: str = "") -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        folder, _, start = prefix.rpartition("/")
        with self._errors(prefix):
            for top in (self.root / folder).glob(f"{start}*"):
                for path in [top] if top.is_file() else (p for p in top.rglob("*") if p.is_file()):
                    with suppress(FileNotFoundError):  # deleted while we looked
                        stat = path.stat()
                        found[str(path.relative_to(self.root))] = Stored(stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}")
        return found

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.root / key
            with self._errors(key), suppress(FileNotFoundError):
                path.unlink()
            with suppress(OSError):  # not empty
                while path.parent != self.root:
                    path = path.parent
                    path.rmdir()

    def discard_unfinished(self, prefix: str) -> None:
        """A copy that was broken off is a hidden file beside its target."""
        self.delete([key for key in self.list(prefix) if key.rpartition("/")[2].startswith(".")])

    def _copy(self, source: Path, target: Path, sha256: str, name: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        digest = hashlib.sha256()
        try:
            with source.open("rb") as reader, temporary.open("wb") as writer:
                while data := reader.read(CHUNK):
                    digest.update(data)
                    writer.write(data)
                writer.flush()
                os.fsync(writer.fileno())
            if digest.hexdigest() != sha256:
                raise Damaged(f"{name} differs from its SHA-256")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotStored(f"{key} is not in {self.root}") from error
        except OSError as error:
            raise StorageError(f"{self.root / key}: {error.strerror or error}") from error
