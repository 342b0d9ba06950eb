"""What a flow does with shared storage, asked directly: is the bucket fit, is everything stored, what does the registry say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.config import GRPORunConfig
from flows.preflight import check_storage
from flows.runs import open_run
from flows.storage import stored_config, upload_rest
from infra.registry import Registry
from tests.support.s3 import S3Server, s3
from trainers.checkpoint import write_manifest
from trainers.run_sink import RunSink

__all__ = ["s3"]

Make = Callable[..., GRPORunConfig]
URI = "s3://runs/team"


@pytest.fixture
def keys(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


def save(folder: Path, step: int, config: dict[str, Any] | None = None) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"w" * 1000 * step)
    (path / "loopwright_config.json").write_text(json.dumps(config or {"step": step}))
    write_manifest(path, step, "digest", {"loss": 1 / step})
    return path


# The bucket, before a run ---------------------------------------------------------------------------------------------


def test_a_bucket_that_takes_checkpoints_passes_and_keeps_nothing_of_the_check(
    home: Path, keys: S3Server, config: Make
) -> None:
    assert list(check_storage(config(storage={"uri": URI}))) == []
    assert keys.files() == {}


def test_what_a_bucket_lacks_is_one_line_of_the_field_with_what_to_do(
    home: Path, keys: S3Server, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(uri: str) -> str:
        (line,) = check_storage(config(storage={"uri": uri}))
        assert line.startswith("storage.uri: ") and "\n" not in line
        return line

    assert "no-such-bucket" in told("s3://no-such-bucket/x")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-that-is-wrong-00000000000")
        line = told(URI)
    assert "AWS_" in line and "another-secret" not in line
    with keys.down():
        assert keys.url in told(URI)


# The rest of the upload, after a run ----------------------------------------------------------------------------------


def test_what_the_trainer_could_not_store_is_stored_at_the_end_of_the_flow(home: Path, keys: S3Server, config: Make) -> None:
    settings = config(storage={"uri": URI})
    folder = home / "runs" / "test"
    save(folder, 1)
    newest = save(folder, 2)
    assert upload_rest(settings, folder) is None
    stored = keys.folder / "team" / "test" / "checkpoint-2"
    assert {path.name for path in stored.iterdir()} == {path.name for path in newest.iterdir()}
    assert upload_rest(settings, folder) is None, "with nothing left to do"
    assert stored_config(settings.storage.of_run("test")) == {"step": 2}


def test_why_it_cannot_be_stored_is_said_and_nothing_is_lost(home: Path, keys: S3Server, config: Make) -> None:
    settings = config(storage={"uri": URI, "timeout_s": 1})
    folder = home / "runs" / "test"
    newest = save(folder, 3)
    with keys.down():
        told = upload_rest(settings, folder, timeout_s=20.0)
    assert told is not None and told.startswith(f"the newest checkpoint is in {folder}, but not in {URI}/test: ")
    assert keys.url in told or "not done within" in told
    assert (newest / "manifest.json").exists()
    assert upload_rest(settings, folder) is None, "it is there again"
    assert (keys.folder / "team" / "test" / "checkpoint-3" / "manifest.json").exists()


def test_a_run_in_a_folder_has_nothing_to_upload(home: Path, config: Make, tmp_path: Path) -> None:
    settings = config(storage={"uri": (tmp_path / "shared").as_uri()})
    assert settings.storage.folder() == tmp_path / "shared"
    assert upload_rest(settings, tmp_path / "shared" / "test") is None
    assert stored_config(settings.storage.of_run("test")) is None


def test_the_newest_config_that_can_be_read_counts(home: Path, keys: S3Server, config: Make) -> None:
    storage = config(storage={"uri": URI}).storage.of_run("test")
    folder = home / "runs" / "test"
    for step in (1, 2):
        storage.store().upload(step, save(folder, step))
    with keys.down() as bucket:
        (bucket / "team" / "test" / "checkpoint-2" / "loopwright_config.json").write_text("{ half")
    assert stored_config(storage) == {"step": 1}


# Where it lies, in the registry ---------------------------------------------------------------------------------------


class Now:
    """`infra.registry_writer.RegistryWriter` without its thread."""

    def __init__(self, registry: Registry, run_id: str) -> None:
        self.registry, self.run_id = registry, run_id

    def submit(self, work: Callable[[], Any]) -> None:
        work()


def test_a_checkpoints_row_says_where_it_is_stored_until_it_is_removed(home: Path, keys: S3Server, config: Make) -> None:
    registry = Registry()
    row, _ = open_run(registry, config(storage={"uri": URI}), "train-grpo")
    tracker = SimpleNamespace(commit=lambda step, path: None)
    sink = RunSink(SimpleNamespace(), tracker, Now(registry, row.id), {}, {"attempt": 1}, lambda info: None)  # type: ignore[arg-type]
    folder = Path(str(row.output_dir))

    def rows() -> dict[int, tuple[str, str | None]]:
        return {one.step: (Path(one.path).name, one.uri) for one in registry.list_checkpoints(row.id)}

    def stored(step: int) -> None:
        sink.storage_event({"event": "stored", "step": step, "uri": f"{URI}/test/checkpoint-{step}", "bytes": 1, "seconds": 1})

    sink.checkpoint(1, str(save(folder, 1)))
    assert rows() == {1: ("checkpoint-1", None)}
    stored(1)
    assert rows() == {1: ("checkpoint-1", f"{URI}/test/checkpoint-1")}

    # Stored before the trainer has told of it: the mirror is a process of its own.
    path = save(folder, 2)
    stored(2)
    sink.checkpoint(2, str(path))
    assert rows()[2] == ("checkpoint-2", f"{URI}/test/checkpoint-2")

    # Gone from the folder, it is still to be fetched; gone from storage too, it is forgotten.
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    sink.checkpoint(3, str(save(folder, 3)))
    assert sorted(rows()) == [1, 2, 3]
    sink.storage_event({"event": "removed", "step": 2})
    assert sorted(rows()) == [1, 3]
    sink.storage_event({"event": "removed", "step": 1})
    assert rows()[1] == ("checkpoint-1", None), "the folder still has it"
