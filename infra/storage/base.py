"""What every storage does, and how one is opened by its address."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from infra.errors import StorageError, StorageRefused


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as a listing shows it. `tag` changes whenever its content is written again."""

    size: int
    tag: str


@dataclass(frozen=True, slots=True)
class Options:
    """How S3 is spoken to; a folder needs none of it.

    Args:
        endpoint_url: None: what boto3 finds (AWS_ENDPOINT_URL_S3, a profile, Amazon).
        timeout_s: without an answer for this long, a request is tried again.
        attempts: tries of one request, with growing pauses between them.
        part_bytes: larger files travel in parts of this size; they are what a broken transfer goes on from.
        parallel: parts under way at a time.
    """

    endpoint_url: str | None = None
    timeout_s: float = 60.0
    attempts: int = 5
    part_bytes: int = 16 << 20
    parallel: int = 8


class Storage(Protocol):
    """Objects by key (`checkpoint-40/model.safetensors`), below one address. Thread-safe.

    An object appears whole or not at all. Every method raises `StorageError`: `StorageRefused` where trying again is of no use,
    `NotStored` where there is no such object.
    """

    uri: str

    def put(self, key: str, path: Path, sha256: str) -> None:
        """Store a file. Goes on from what an earlier try has sent. `Damaged`: the file is not what `sha256` says."""
        ...

    def put_bytes(self, key: str, data: bytes) -> None: ...

    def get(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write an object to `path`, hashed while it is read. `Damaged`: it differs; then there is no file."""
        ...

    def get_bytes(self, key: str) -> bytes: ...

    def sha256(self, key: str) -> str:
        """Of the whole content, read now."""
        ...

    def list(self, prefix: str = "") -> dict[str, Stored]:
        """Every object whose key begins with `prefix`."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Those that are not there are passed over."""
        ...

    def discard_unfinished(self, prefix: str) -> None:
        """Throw away what transfers that were broken off have sent for keys that begin with `prefix`."""
        ...

    def check(self) -> None:
        """What a run does with its checkpoints, once each: raises if it could not store, list, read or delete them here."""
        key, data = f".loopwright-check-{uuid.uuid4().hex[:8]}", b"may be deleted\n" * 300
        self.discard_unfinished(key)
        self.put_bytes(key, data)
        try:
            if key not in self.list(key):
                raise StorageError(f"{self.uri}: what was stored is not in the list of what is there")
            if self.get_bytes(key) != data:
                raise StorageError(f"{self.uri}: what comes back is not what was stored")
        finally:
            self.delete([key])


def is_remote(uri: str | None) -> bool:
    """Whether an address names something else than a folder of this machine."""
    return urlsplit(uri or "").scheme not in ("", "file")


def folder_of(uri: str) -> Path:
    """The folder that a plain path or a `file://` address names."""
    return Path(unquote(urlsplit(uri).path) if uri.startswith("file:") else uri).expanduser().absolute()


def open_storage(uri: str, options: Options | None = None) -> Storage:
    """The storage at `uri`: a folder (plain or `file://`), or `s3://bucket/prefix`. Nothing is asked of it yet.

    Raises:
        StorageRefused: an address of another kind.
    """
    if not is_remote(uri):
        from infra.storage.folder import FolderStorage

        return FolderStorage(folder_of(uri))
    if urlsplit(uri).scheme == "s3":
        from infra.storage.s3 import S3Storage

        return S3Storage(uri, options or Options())
    raise StorageRefused(f"{urlsplit(uri).scheme}:// is no storage: write a folder, file:///folder or s3://bucket/prefix")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
