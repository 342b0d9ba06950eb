"""Storage in S3, or what speaks like it.

    put ─ file read once ─▶ parts ─▶ pool ─▶ upload_part (Content-MD5 each) ─▶ complete     an object appears only now
    get ◀─ hashed, in order ◀─ ranges ◀─ pool ◀─ get_object

Invariants:
- a file is hashed while it is read: what is not what its SHA-256 says never becomes an object;
- the service checks the MD5 of every part, so an object holds the bytes that were hashed;
- at most `2 × parallel` parts are in memory, however many files travel at a time;
- credentials come from boto3's own chain only; when they are refused the client is made anew, so new ones are seen.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from infra.errors import Damaged, NotStored, StorageError, StorageRefused
from infra.storage.base import Options, Storage, Stored
from infra.storage.s3_client import make_client, translated

MOST_PARTS = 10_000
MOST_DELETED = 1000  # by one request
BODY_TRIES = 3


class S3Storage(Storage):
    """See `Storage`."""

    def __init__(self, uri: str, options: Options) -> None:
        parts = urlsplit(uri)
        if "@" in parts.netloc:
            raise StorageRefused("leave credentials out of the address: boto3 finds them in the environment or in ~/.aws")
        if not parts.netloc:
            raise StorageRefused(f"{uri} names no bucket: write s3://bucket/prefix")
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")
        self.uri = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.options = options
        self._lock = threading.Lock()
        self._client: Any = None
        self._pool = ThreadPoolExecutor(options.parallel, "s3")
        self._room = threading.BoundedSemaphore(2 * options.parallel)

    # Files -----------------------------------------------------------------------------------------------------------

    def put(self, key: str, path: Path, sha256: str) -> None:
        size = path.stat().st_size
        if self._has(key, size, sha256):
            return
        if size > self.options.part_bytes:
            self._put_parts(key, path, size, sha256)
            return
        with self._room:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Damaged(f"{path} differs from its SHA-256")
            self._put(key, data, Metadata={"sha256": sha256})

    def put_bytes(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def get(self, key: str, path: Path, size: int, sha256: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                for data in self._ranges(key, size):
                    digest.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != sha256:
                raise Damaged(f"{self.uri}/{key} differs from its SHA-256")
        except BaseException as error:
            with contextlib.suppress(OSError):
                path.unlink()
            if isinstance(error, OSError):
                raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
            raise

    def get_bytes(self, key: str) -> bytes:
        return self._read(key)

    def sha256(self, key: str) -> str:
        size = self._call("head_object", Key=self._key(key))["ContentLength"]
        digest = hashlib.sha256()
        for data in self._ranges(key, size):
            digest.update(data)
        return digest.hexdigest()

    # Listing ---------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        start, token = self._key(prefix), {}
        while True:
            page = self._call("list_objects_v2", Prefix=start, **token)
            for entry in page.get("Contents", ()):
                found[self._short(entry["Key"])] = Stored(entry["Size"], entry.get("ETag", ""))
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        left = [{"Key": self._key(key)} for key in keys]
        while left:
            some, left = left[:MOST_DELETED], left[MOST_DELETED:]
            answer = self._call("delete_objects", Delete={"Objects": some, "Quiet": True})
            if errors := answer.get("Errors"):
                first = errors[0]
                raise StorageError(f"{first.get('Key')} cannot be deleted: {first.get('Code')} {first.get('Message', '')}")

    def discard_unfinished(self, prefix: str) -> None:
        for upload in self._uploads(prefix):
            with contextlib.suppress(NotStored):
                self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])

    # Below -----------------------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _short(self, key: str) -> str:
        return key.removeprefix(f"{self.prefix}/") if self.prefix else key

    def _call(self, operation: str, **arguments: Any) -> Any:
        with self._lock:
            if self._client is None:
                self._client = make_client(self.options)
            client = self._client
        try:
            return getattr(client, operation)(Bucket=self.bucket, **arguments)
        except (ClientError, BotoCoreError) as error:
            known = translated(error, operation, self.bucket, arguments.get("Key", ""), client.meta.endpoint_url)
            if isinstance(known, StorageRefused):
                self._client = None  # the next call looks for credentials anew
            raise known from error

    def _put(self, key: str, data: bytes, **more: Any) -> None:
        self._call("put_object", Key=self._key(key), Body=data, ContentMD5=_base64(_md5(data)), **more)

    def _has(self, key: str, size: int, sha256: str) -> bool:
        """An earlier try has stored it; what it was hashed to is in the object's metadata."""
        try:
            head = self._call("head_object", Key=self._key(key))
        except NotStored:
            return False
        told = {name.lower(): value for name, value in head.get("Metadata", {}).items()}
        return head["ContentLength"] == size and told.get("sha256") == sha256

    def _uploads(self, prefix: str) -> list[dict[str, Any]]:
        try:
            page = self._call("list_multipart_uploads", Prefix=self._key(prefix))
        except NotStored:  # rclone's answer where a bucket never had any
            return []
        return sorted(page.get("Uploads", ()), key=lambda upload: upload["Initiated"])

    def _begin(self, key: str, sha256: str) -> tuple[str, dict[int, tuple[str, int]]]:
        """A multipart upload, and the parts (MD5, size) that an earlier try has sent of it."""
        begun = [upload for upload in self._uploads(key) if upload["Key"] == self._key(key)]
        if not begun:
            upload = self._call("create_multipart_upload", Key=self._key(key), Metadata={"sha256": sha256})
            return upload["UploadId"], {}
        there: dict[int, tuple[str, int]] = {}
        marker: dict[str, Any] = {}
        while True:
            page = self._call("list_parts", Key=self._key(key), UploadId=begun[-1]["UploadId"], **marker)
            there |= {part["PartNumber"]: (part["ETag"].strip('"'), part["Size"]) for part in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                return begun[-1]["UploadId"], there
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def _put_parts(self, key: str, path: Path, size: int, sha256: str) -> None:
        upload, there = self._begin(key, sha256)
        part_bytes = max(self.options.part_bytes, -(-size // MOST_PARTS))
        digest, sent, failed = hashlib.sha256(), [], threading.Event()

        def send(number: int, data: bytes, md5: bytes) -> dict[str, Any]:
            try:
                if there.get(number) == (md5.hex(), len(data)):
                    return {"PartNumber": number, "ETag": f'"{md5.hex()}"'}
                target = {"Key": self._key(key), "UploadId": upload, "PartNumber": number}
                answer = self._call("upload_part", Body=data, ContentMD5=_base64(md5), **target)
                return {"PartNumber": number, "ETag": answer["ETag"]}
            except BaseException:
                failed.set()
                raise
            finally:
                self._room.release()

        with path.open("rb") as file:
            while not failed.is_set():
                self._room.acquire()
                data = file.read(part_bytes)
                if not data:
                    self._room.release()
                    break
                digest.update(data)
                sent.append(self._pool.submit(send, len(sent) + 1, data, _md5(data)))
        parts = _results(sent)
        target = {"Key": self._key(key), "UploadId": upload}
        if digest.hexdigest() != sha256:
            self._call("abort_multipart_upload", **target)
            raise Damaged(f"{path} differs from its SHA-256")
        self._call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **target)

    def _ranges(self, key: str, size: int) -> Iterator[bytes]:
        """The content in order, some ranges ahead."""
        starts = iter(range(0, size, self.options.part_bytes))
        ahead: deque[Future[bytes]] = deque()
        try:
            while True:
                for start in starts:
                    end = min(start + self.options.part_bytes, size) - 1
                    ahead.append(self._pool.submit(self._read, key, start, end))
                    if len(ahead) >= max(2, self.options.parallel // 2):
                        break
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def _read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """boto3 tries a request again, but not an answer that breaks off in the middle."""
        span = {} if start is None else {"Range": f"bytes={start}-{end}"}
        for attempt in range(BODY_TRIES):
            answer = self._call("get_object", Key=self._key(key), **span)
            try:
                data = answer["Body"].read()
            except Exception as error:  # urllib3's, botocore's and the socket's own
                if attempt + 1 == BODY_TRIES:
                    raise StorageError(f"{self.uri}/{key} breaks off while it is read: {error}") from error
                time.sleep(0.2 * 2**attempt)
                continue
            if start is not None and end is not None and len(data) != end - start + 1:
                raise Damaged(f"{self.uri}/{key} is shorter than its manifest says")
            return data
        raise AssertionError("unreachable")


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _results(futures: list[Future[Any]]) -> list[Any]:
    """All results once all have ended; the first failure is raised."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
