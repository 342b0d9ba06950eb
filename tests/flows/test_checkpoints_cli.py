"""`loopwright checkpoints` over a run's folder and S3, by the run's name and by address."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flows.checkpoints_cli import checkpoints
from flows.config import GRPORunConfig
from flows.runs import open_run
from infra.errors import NotStored, StorageError
from infra.registry import Registry
from tests.support.s3 import S3Server, s3
from trainers.checkpoint import fault, write_manifest

__all__ = ["s3"]


@pytest.fixture
def folder(home: Path, s3: S3Server, config: Callable[..., GRPORunConfig]) -> Path:
    """Run `test`: steps 1 and 2 in its folder, 1 in S3 too."""
    settings = config(storage={"uri": "s3://runs/team", "timeout_s": 20})
    row, _ = open_run(Registry(), settings, "train-grpo")
    folder = Path(str(row.output_dir))
    assert folder == home / "runs" / "test"
    for step in (1, 2):
        path = folder / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(os.urandom(2000))
        write_manifest(path, step, "digest", {"reward": step / 10})
        Registry().record_checkpoint(row.id, step, str(path))
    settings.storage.of_run("test").store().upload(1, folder / "checkpoint-1")
    return folder


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(checkpoints, list(arguments))


def test_list_shows_both_places_and_an_address_needs_no_registry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(ask("list", "test", "--json").output)
    assert [(row["step"], row["where"].startswith("s3://"), row["bytes"], row["fault"]) for row in rows] == [
        (1, False, 2000, None),
        (1, True, 2000, None),
        (2, False, 2000, None),
    ]
    assert rows[2]["metrics"] == {"reward": 0.2}
    assert "s3://runs/team/test/checkpoint-1" in ask("list", "test").output
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path / "another"))
    for address, steps in ((str(folder), [1, 2]), ("s3://runs/team/test", [1])):
        assert [row["step"] for row in json.loads(ask("list", address, "--json").output)] == steps
    assert isinstance(ask("list", "s3://runs/nothing").exception, NotStored)
    assert "there is no folder ./nothing" in ask("list", "./nothing").output


def test_verify_reads_everything_and_exits_1_for_a_flipped_bit(folder: Path, s3: S3Server) -> None:
    result = ask("verify", "test")
    assert result.exit_code == 0 and result.output.count("whole") == 3
    with s3.down() as bucket:
        path = bucket / "team/test/checkpoint-1/model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    result = ask("verify", "test")
    assert result.exit_code == 1
    assert "BROKEN  s3://runs/team/test/checkpoint-1: model.safetensors differs from its SHA-256" in result.output
    assert ask("verify", "test", "2").exit_code == 0


def test_pins_are_marks_beside_the_checkpoint_and_the_registry_has_a_copy(folder: Path, s3: S3Server) -> None:
    assert ask("pin", "test", "1").exit_code == 0
    assert (folder / "checkpoint-1/PINNED").exists() and "team/test/checkpoint-1/PINNED" in s3.files()
    registry = Registry()
    pinned = lambda: [row.pinned for row in registry.list_checkpoints(registry.get_run("test").id)]  # noqa: E731
    assert pinned() == [True, False]
    assert [row["pinned"] for row in json.loads(ask("list", "test", "--json").output)] == [True, True, False]
    assert ask("unpin", "test", "1").exit_code == 0
    assert not (folder / "checkpoint-1/PINNED").exists() and "team/test/checkpoint-1/PINNED" not in s3.files()
    assert pinned() == [False, False]
    error = ask("pin", "test", "7").exception
    assert isinstance(error, NotStored) and str(error) == "test has no checkpoint of step 7 (checkpoints: 1, 2)"


def test_fetch_takes_the_newest_whole_one_or_a_step(folder: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    assert ask("fetch", "test", str(dest)).output.strip() == str(dest / "checkpoint-2")
    assert ask("fetch", "s3://runs/team/test", "1", str(dest)).exit_code == 0
    assert fault(dest / "checkpoint-1") is None and fault(dest / "checkpoint-2") is None
    assert isinstance(ask("fetch", "test", str(dest)).exception, StorageError), "what is there is not written over"
    (folder / "checkpoint-2/model.safetensors").write_bytes(bytes(2000))
    result = ask("fetch", "test", str(tmp_path / "other"))
    assert "warning: " in result.output and fault(tmp_path / "other/checkpoint-1") is None
    assert ask("fetch", "test", "a", "b", "c").exit_code == 2
