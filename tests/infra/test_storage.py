"""Objects in a folder and in S3: the same behaviour, whole or absent, and what is said of faults."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import Damaged, NotStored, StorageError, StorageRefused
from infra.storage import Options, Storage, open_storage
from tests.support.s3 import S3Server, s3
from tests.support.waiting import wait_until

__all__ = ["s3"]
SMALL = {"part_bytes": 5 << 20, "attempts": 2, "timeout_s": 20.0, "parallel": 4}


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return open_storage(f"file://{tmp_path}/stored")
    request.getfixturevalue("s3")
    return open_storage("s3://runs/some/where", Options(**SMALL))


def written(path: Path, data: bytes) -> tuple[Path, str]:
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def test_what_is_stored_comes_back_and_is_listed_and_goes(storage: Storage, tmp_path: Path) -> None:
    data = os.urandom(11 << 20)  # more than two parts
    file, digest = written(tmp_path / "file", data)
    storage.put("checkpoint-1/a/big.bin", file, digest)
    storage.put_bytes("checkpoint-1/manifest.json", b"{}")
    storage.put_bytes("logs/x", b"")
    assert {key: stored.size for key, stored in storage.list("checkpoint-").items()} == {
        "checkpoint-1/a/big.bin": len(data),
        "checkpoint-1/manifest.json": 2,
    }
    assert storage.sha256("checkpoint-1/a/big.bin") == digest
    storage.get("checkpoint-1/a/big.bin", tmp_path / "back" / "file", len(data), digest)
    assert (tmp_path / "back" / "file").read_bytes() == data
    assert storage.get_bytes("checkpoint-1/manifest.json") == b"{}" and storage.get_bytes("logs/x") == b""
    storage.put_bytes("checkpoint-1/manifest.json", b"[]")
    assert storage.get_bytes("checkpoint-1/manifest.json") == b"[]"
    storage.delete(["checkpoint-1/a/big.bin", "checkpoint-1/manifest.json", "never/there"])
    assert storage.list("checkpoint-") == {} and list(storage.list("logs/")) == ["logs/x"]
    storage.check()
    assert list(storage.list()) == ["logs/x"], "the check leaves nothing behind"


def test_what_is_not_what_its_digest_says_is_neither_stored_nor_fetched(storage: Storage, tmp_path: Path) -> None:
    for name, size in (("small", 1000), ("large", 6 << 20)):
        file, digest = written(tmp_path / name, bytes(size))
        with pytest.raises(Damaged, match="differs from its SHA-256"):
            storage.put(name, file, "0" * 64)
        assert storage.list() == {}, "nothing has appeared"
        storage.put(name, file, digest)
        with pytest.raises(Damaged, match="differs from its SHA-256"):
            storage.get(name, tmp_path / "back", size, "0" * 64)
        assert not (tmp_path / "back").exists()
        storage.delete([name])
    with pytest.raises(NotStored):
        storage.get("nothing", tmp_path / "back", 3, digest)
    with pytest.raises(NotStored):
        storage.get_bytes("nothing")
    with pytest.raises(NotStored):
        storage.sha256("nothing")


def test_an_object_that_became_shorter(s3: S3Server, tmp_path: Path) -> None:
    storage = open_storage("s3://runs", Options(**SMALL))
    file, digest = written(tmp_path / "file", os.urandom(6 << 20))
    storage.put("file", file, digest)
    for length in (0, 1000, 5 << 20, (6 << 20) - 1):
        with s3.down() as bucket:
            (bucket / "file").write_bytes(file.read_bytes()[:length])
        with pytest.raises(Damaged):
            storage.get("file", tmp_path / "back", 6 << 20, digest)
        assert not (tmp_path / "back").exists()


def test_parts_that_were_sent_are_not_sent_again(s3: S3Server, tmp_path: Path) -> None:
    """An upload that was broken off by the death of its process, here of its last request."""
    storage = open_storage("s3://runs/p", Options(**SMALL))
    file, digest = written(tmp_path / "file", os.urandom(12 << 20))
    real, sent = storage._call, []  # type: ignore[attr-defined]

    def call(operation: str, **arguments: object) -> object:
        if operation == "upload_part":
            sent.append(arguments["PartNumber"])
        if operation == "complete_multipart_upload" and len(sent) == 3:
            raise StorageError("cut")
        return real(operation, **arguments)

    storage._call = call  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="cut"):
        storage.put("file", file, digest)
    assert storage.list() == {} and sorted(sent) == [1, 2, 3]
    sent.append("again")
    storage.put("file", file, digest)
    assert sent[3:] == ["again"] and storage.sha256("file") == digest
    storage.put("file", file, digest)
    assert sent[3:] == ["again"], "what is there whole is not sent again either"


def test_unfinished_uploads_are_thrown_away(s3: S3Server, tmp_path: Path) -> None:
    storage = open_storage("s3://runs/p", Options(**SMALL))
    for key in ("checkpoint-1/a", "checkpoint-2/a"):
        storage._call("create_multipart_upload", Key=f"p/{key}")  # type: ignore[attr-defined]
    storage.discard_unfinished("checkpoint-1/")
    assert [upload["Key"] for upload in storage._uploads("")] == ["p/checkpoint-2/a"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://", "names no bucket: write s3://bucket/prefix"),
        ("gs://bucket/x", "gs:// is no storage: write a folder, file:///folder or s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "leave credentials out of the address"),
    ],
)
def test_addresses_that_are_refused(uri: str, message: str) -> None:
    with pytest.raises(StorageRefused, match=message):
        open_storage(uri)


def test_a_bucket_that_is_not_there_and_keys_that_are_refused_say_what_to_set(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageRefused, match=r"there is no bucket nothing at http://127.*: create it, or name another"):
        open_storage("s3://nothing/x", Options(**SMALL)).check()
    storage = open_storage("s3://runs/x", Options(**SMALL))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(
        StorageRefused, match=r"SignatureDoesNotMatch.*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ) as caught:
        storage.check()
    assert "another-secret" not in str(caught.value)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageRefused, match=r"Partial credentials found in env.*; set AWS_ACCESS_KEY_ID"):
        storage.check()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.environment()["AWS_SECRET_ACCESS_KEY"])
    storage.check()  # the same storage sees credentials that were set meanwhile


def test_a_server_that_hangs_and_one_that_is_gone_are_errors_in_bounded_time(s3: S3Server) -> None:
    storage = open_storage("s3://runs/x", Options(**SMALL | {"timeout_s": 0.5}))
    storage.check()
    with s3.frozen(), pytest.raises(StorageError) as hangs:
        storage.check()
    s3.stop()
    with pytest.raises(StorageError) as gone:
        storage.check()
    assert not isinstance(hangs.value, StorageRefused) and not isinstance(gone.value, StorageRefused)
    s3.start()
    wait_until(lambda: succeeds(storage.check), 30, "the storage that came back")


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"{tmp_path}/file/x"):
        open_storage(str(tmp_path / "file" / "x")).check()


def succeeds(work: Callable[[], None]) -> bool:
    try:
        work()
    except StorageError:
        return False
    return True
