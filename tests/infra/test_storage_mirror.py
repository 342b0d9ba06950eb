"""A run's folder kept in S3 by a process of its own, under faults: never half a checkpoint, never the last good one lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.errors import StorageError
from infra.storage import checkpoints as stored_names
from infra.storage.checkpoints import Listed
from infra.storage.mirror import Mirror
from infra.storage.resume import newest_whole
from infra.storage.run_storage import RunStorage
from infra.storage.uploads import Uploads
from tests.support.s3 import Link, S3Server, s3
from tests.support.waiting import wait_until
from trainers import checkpoint as trainers_names
from trainers.checkpoint import fault, write_manifest
from trainers.retention import Retention

__all__ = ["s3"]
OPTIONS = {"timeout_s": 20.0, "attempts": 2, "part_bytes": 5 << 20}
BIG = 6 << 20  # more than one part
WAIT_S = 40.0


def write(folder: Path, step: int, size: int = 1000, **metrics: float) -> Path:
    """A checkpoint whose content is its step's."""
    path = folder / f"checkpoint-{step}"
    (path / "rng").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(os.urandom(size))
    (path / "rng" / "rank-0.pt").write_bytes(b"r" * step)
    (path / "rollout_state.json").write_text(json.dumps({"step": step}))
    write_manifest(path, step, "digest", metrics)
    return path


class Run:
    """A run's folder and its mirror."""

    def __init__(self, folder: Path, **keep: object) -> None:
        self.folder, self.events = folder, []  # type: ignore[var-annotated]
        self.folder.mkdir()
        self.storage = RunStorage("s3://runs/x/test", OPTIONS, keep, 60.0)
        self.uploads: Uploads | None = None
        self.last = 2

    def mirror(self, **options: object) -> Uploads:
        storage = RunStorage(self.storage.uri, {**OPTIONS, **options}, self.storage.keep)
        self.uploads = storage.uploads(self.folder, self.last, self.events.append)
        return self.uploads

    def save(self, step: int, size: int = 1000, **metrics: float) -> Path:
        path = write(self.folder, step, size, **metrics)
        assert self.uploads is not None, "there is no mirror yet"
        self.uploads.saved(step)
        return path

    def told(self, kind: str, **facts: object) -> list[dict]:
        return [e for e in list(self.events) if e["event"] == kind and facts.items() <= e.items()]

    def wait_for(self, kind: str, **facts: object) -> None:
        wait_until(lambda: self.told(kind, **facts), WAIT_S, f"{kind} {facts} in {self.events}")

    def whole(self) -> list[int]:
        """Steps that are whole in storage, every file read."""
        store = self.storage.store()
        return [step for step, entry in store.listed().items() if store.verify(entry) is None]


@pytest.fixture
def run(s3: S3Server, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "test")
    yield run
    if run.uploads is not None:
        run.uploads.close()


def here(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def test_trainers_and_storage_mean_the_same_by_a_checkpoint() -> None:
    for name in ("PREFIX", "MANIFEST", "PINNED"):
        assert getattr(stored_names, name) == getattr(trainers_names, name)
    assert Retention(1).removable({1: Listed(1), 2: Listed(2)}, 2) == {1}


def test_what_is_saved_is_stored_and_both_sides_keep_what_the_rule_says(run: Run, s3: S3Server) -> None:
    run.storage = RunStorage(run.storage.uri, OPTIONS, {"best": 1, "metric": "reward", "every": 4})
    uploads = run.mirror()
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4), (6, 0.1)):
        run.save(step, reward=reward)
        run.wait_for("stored", step=step)
    assert uploads.finish(WAIT_S)
    assert run.whole() == [2, 4, 5, 6] == here(run.folder), "the best, every fourth, the last two"
    for step in (2, 4, 5, 6):
        for path in (run.folder / f"checkpoint-{step}").rglob("*"):
            assert path.is_dir() or (s3.folder / "x/test" / path.relative_to(run.folder)).read_bytes() == path.read_bytes()


def test_pinned_ones_stay_in_both(run: Run) -> None:
    run.last = 1
    uploads = run.mirror()
    (run.save(1) / "PINNED").touch()
    run.wait_for("stored", step=1)
    run.storage.store().pin(1)
    for step in (2, 3):
        run.save(step)
        run.wait_for("stored", step=step)
    assert uploads.finish(WAIT_S)
    assert run.whole() == [1, 3] == here(run.folder)


def test_a_mirror_killed_in_the_middle_of_an_upload_leaves_the_last_good_one_and_is_gone_on_with(
    run: Run, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(s3.port)
    try:
        uploads = run.mirror(endpoint_url=link.url)
        run.save(1)
        run.wait_for("idle")
        run.wait_for("stored", step=1)
        link.let_through(BIG // 2)
        run.save(2, BIG)
        wait_until(lambda: link.full, WAIT_S, "the middle of an upload")
        os.kill(uploads._process.pid, signal.SIGKILL)
        wait_until(lambda: uploads._process.poll() is not None, WAIT_S)
        link.open()
        assert run.whole() == [1], "what was half sent is no checkpoint"
        shutil.rmtree(run.folder / "checkpoint-1")
        run.save(3, BIG)  # the mirror is started again
        assert "THE UPLOAD TO s3://runs/x/test DIED" in caplog.text
        assert uploads.finish(WAIT_S)
        assert run.whole() == [2, 3]
    finally:
        link.close()


def test_the_folder_being_uploaded_is_held_while_newer_ones_are_saved(run: Run, s3: S3Server) -> None:
    run.last = 1
    link = Link(s3.port)
    try:
        uploads = run.mirror(endpoint_url=link.url)
        run.wait_for("idle")
        link.let_through(BIG // 2)
        run.save(1, BIG)
        wait_until(lambda: link.full, WAIT_S, "the middle of an upload")
        run.save(2)
        run.save(3)
        wait_until(lambda: here(run.folder) == [1, 3], WAIT_S, "only what is held and the newest")
        link.open()
        run.wait_for("stored", step=3)
        assert uploads.finish(WAIT_S)
        assert here(run.folder) == [3] == run.whole()
        assert run.told("stored", step=1), "what was begun was finished before it was dropped"
    finally:
        link.close()


def test_what_was_saved_while_the_word_of_an_older_one_was_on_its_way_stays(tmp_path: Path) -> None:
    given_up, _, _ = (write(tmp_path, step) for step in (7, 2, 3))  # the run fell back behind 7, then went on
    os.utime(given_up, (1, 1))
    mirror = Mirror(tmp_path, None, Retention(last=1).removable)  # type: ignore[arg-type]
    mirror.tidy_folder(2)
    assert here(tmp_path) == [2, 3]
    mirror.tidy_folder(3)
    assert here(tmp_path) == [3]


def test_a_storage_that_goes_away_or_refuses_is_tried_again_and_nothing_is_lost(
    run: Run, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    run.last = 1
    uploads = run.mirror()
    run.save(1)
    run.wait_for("stored", step=1)
    s3.stop()
    run.save(2)
    run.wait_for("failed")
    run.save(3)
    assert here(run.folder)[-1] == 3, "saving goes on"
    s3.start(secret="the-keys-were-changed-in-mid-run-0000000")
    wait_until(lambda: any("SignatureDoesNotMatch" in e["error"] for e in run.told("failed")), WAIT_S)
    assert (s3.folder / "x/test/checkpoint-1/manifest.json").exists(), "the last good one stays while nothing newer is there"
    s3.stop()
    s3.start()
    uploads.saved(3)  # does not wait for the pause between tries
    assert uploads.finish(WAIT_S)
    assert run.whole() == [3]
    assert "STORING CHECKPOINTS IN s3://runs/x/test FAILED, training goes on" in caplog.text


def test_an_endpoint_that_hangs_costs_the_trainer_nothing_but_the_bound_at_its_end(run: Run, s3: S3Server) -> None:
    uploads = run.mirror(timeout_s=1.0)
    run.wait_for("idle")
    with s3.frozen():
        run.save(1)
        assert not uploads.finish(3.0)
        assert uploads.failing
    uploads = run.mirror()
    assert uploads.finish(WAIT_S) and run.whole() == [1], "the next mirror stores what the last one could not"


def test_a_local_checkpoint_that_is_damaged_is_not_stored_over_a_good_one(run: Run) -> None:
    run.mirror()
    run.save(1)
    run.wait_for("stored", step=1)
    path = write(run.folder, 2)
    (path / "model.safetensors").write_bytes(b"x" * 1000)
    assert run.uploads is not None
    run.uploads.saved(2)
    run.wait_for("damaged", step=2)
    assert not run.uploads.finish(WAIT_S), "not everything is stored"
    assert run.whole() == [1]


def test_nothing_goes_from_storage_before_the_newest_was_read_back(run: Run, s3: S3Server) -> None:
    """The newest becomes damaged in storage behind everybody's back: the older ones stay, and it is stored anew."""
    run.last = 2
    uploads = run.mirror()
    for step in (1, 2):
        run.save(step)
        run.wait_for("stored", step=step)
    assert uploads.finish(WAIT_S)
    write(run.folder, 3)
    run.last = 10
    assert run.mirror().finish(WAIT_S)  # stored, and nothing is tidied
    with s3.down() as bucket:
        flip(bucket / "x/test/checkpoint-3/model.safetensors")
    run.last = 1
    run.events.clear()
    uploads = run.mirror()
    uploads.saved(3)
    run.wait_for("failed")
    assert "is not what was stored (model.safetensors differs from its SHA-256)" in run.told("failed")[0]["error"]
    assert not run.told("removed"), "nothing went"
    assert uploads.finish(WAIT_S) and run.whole() == [3]
    assert [e["step"] for e in run.told("removed")] == [1, 2] and run.told("stored", step=3)


# Going on from storage ---------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def two(run: Run) -> Run:
    """Steps 1 and 2 in storage, nothing in the folder."""
    store = run.storage.store()
    for step in (1, 2):
        store.upload(step, write(run.folder, step))
        shutil.rmtree(run.folder / f"checkpoint-{step}")
    return run


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: None, ""),
        (lambda folder: flip(folder / "model.safetensors"), "model.safetensors differs from its SHA-256"),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 10),
            "model.safetensors has 10 bytes, the manifest says 1000",
        ),
        (lambda folder: (folder / "rng/rank-0.pt").unlink(), "rng/rank-0.pt is missing"),
        (lambda folder: os.truncate(folder / "manifest.json", 20), "no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"),
    ],
    ids=["whole", "flipped", "truncated", "missing", "torn", "no manifest"],
)
def test_the_newest_whole_one_is_fetched_whatever_is_broken(
    two: Run, s3: S3Server, damage, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with s3.down() as bucket:
        damage(bucket / "x/test/checkpoint-2")
    found = two.storage.newest_whole(two.folder, fault)
    step = 2 if not said else 1
    assert found == two.folder / f"checkpoint-{step}" and fault(found) is None
    assert json.loads((found / "rollout_state.json").read_text()) == {"step": step}
    assert said in caplog.text and (not said or "falling back" in caplog.text)
    assert here(two.folder) == [step]


def test_a_damaged_local_one_is_mended_from_storage_and_a_whole_one_is_not_fetched(two: Run, s3: S3Server) -> None:
    found = two.storage.newest_whole(two.folder, fault)
    assert found is not None
    flip(found / "model.safetensors")
    good = (found / "rng" / "rank-0.pt").stat().st_ino
    (found / "left-over").write_text("of another start")
    assert two.storage.newest_whole(two.folder, fault) == found and fault(found) is None
    assert (found / "rng" / "rank-0.pt").stat().st_ino == good, "what was good is not fetched again"
    assert not (found / "left-over").exists()
    s3.stop()
    options = {**OPTIONS, "timeout_s": 1.0, "attempts": 1}
    away = RunStorage(two.storage.uri, options).store()
    assert newest_whole(two.folder, away, fault) == found, "storage out of reach does not stop a run that has it here"
    shutil.rmtree(found)
    with pytest.raises(StorageError):  # and a run without any does not begin anew because of it
        newest_whole(two.folder, away, fault)


FETCHES = """
import sys
from pathlib import Path
from infra.storage.run_storage import RunStorage
from trainers.checkpoint import fault
print("begins", flush=True)
RunStorage(sys.argv[1], {"endpoint_url": sys.argv[2], "timeout_s": 60}).newest_whole(Path(sys.argv[3]), fault)
"""


@pytest.mark.slow
def test_a_fetch_that_is_killed_half_way_leaves_nothing_that_looks_whole_and_is_gone_on_with(run: Run, s3: S3Server) -> None:
    store = run.storage.store()
    store.upload(1, write(run.folder, 1, BIG))
    shutil.rmtree(run.folder / "checkpoint-1")
    link = Link(s3.port)
    process = subprocess.Popen([sys.executable, "-c", FETCHES, str(run.storage.uri), link.url, str(run.folder)])
    try:
        # A request of a few hundred bytes asks for each file: the link is full after the first ones.
        link.let_through(2000)
        wait_until(lambda: link.full, WAIT_S, "the middle of a fetch")
        wait_until(lambda: any(run.folder.glob(".fetch-*")), WAIT_S, "the folder it fetches into")
        process.kill()
        process.wait()
        assert here(run.folder) == [], "nothing that is named like a checkpoint"
        found = run.storage.newest_whole(run.folder, fault)
        assert found == run.folder / "checkpoint-1" and fault(found) is None and not list(run.folder.glob(".fetch-*"))
    finally:
        process.kill()
        process.wait()
        link.close()


def test_no_room_here_is_said_and_leaves_what_there_is(tmp_path: Path) -> None:
    size = 2 * shutil.disk_usage(tmp_path).free
    path = write(tmp_path / "stored", 3)
    os.truncate(path / "model.safetensors", size)  # sparse: where it is stored it takes no room
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["bytes"] = size
    (path / "manifest.json").write_text(json.dumps(manifest))
    needed = sum(file["bytes"] for file in manifest["files"].values())
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(StorageError, match=rf"bytes free, {path} needs {needed:,} more"):
        RunStorage(str(tmp_path / "stored")).newest_whole(tmp_path / "run", fault)
    assert here(tmp_path / "run") == [1]


def test_a_file_that_cannot_be_written_here_is_said_and_leaves_what_there_is(two: Run) -> None:
    (two.folder / "checkpoint-1").mkdir()
    store = two.storage.store()
    entry = store.listed()[2]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # fails in mid-file, as on a disk that is full
    try:
        with pytest.raises(StorageError, match=r"model\.safetensors cannot be written: File too large"):
            store.fetch(entry, two.folder / "checkpoint-2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert here(two.folder) == [1]


def test_a_manifest_cannot_write_outside_of_its_checkpoint(two: Run, s3: S3Server) -> None:
    with s3.down() as bucket:
        path = bucket / "x/test/checkpoint-2/manifest.json"
        path.write_text(path.read_text().replace('"rng/rank-0.pt"', '"../../escaped"'))
    assert two.storage.newest_whole(two.folder, fault) == two.folder / "checkpoint-1"
