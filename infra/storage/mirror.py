"""Keeps shared storage like a run's folder, beside training: a process of its own, so that training never waits for it.

    trainer rank 0 ─ Uploads ──stdin──▶ "saved 40" … "finish"          one line each
                             ◀─stdout── {"event": "stored", "step": 40, …}

    main thread:  saved ─▶ what may go of the folder goes ─▶ wakes ─┐
    worker:       ┌─ what the rule keeps, the folder has and storage lacks: newest first ─▶ upload ─┐◀┘
                  └─ again ◀─ failed: a pause that grows, or the next "saved" ◀─────────────────────┤
                                                          stored ─▶ what may go of the storage goes ┘

Invariants:
- what is to be done follows from what lies in the folder and in storage alone, so a kill at any moment loses nothing but time;
- the folder being uploaded stays until that upload has ended, whatever the rule says;
- storage is tidied only once the newest checkpoint is there and every file of it was read back and hashed;
- the parent's end is the end of this process: an upload that is under way is gone on with by the next one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import Damaged, NotStored, StorageError, StorageRefused
from infra.storage.base import Options, open_storage
from infra.storage.checkpoints import MANIFEST, PINNED, PREFIX, CheckpointStore, Listed, Manifest, local_folders

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0

Rule = Callable[[Mapping[int, Any], int], set[int]]  # what there is (see `Listed`), the newest ─▶ steps that may go
Say = Callable[..., None]


def read_local(folder: Path) -> dict[int, Listed]:
    """What a run's folder has, as its manifests say; not hashed."""
    found: dict[int, Listed] = {}
    for step, path in local_folders(folder):
        entry = found[step] = Listed(step)
        try:
            entry.manifest = Manifest.parse((path / MANIFEST).read_bytes(), str(path))
        except (OSError, Damaged):
            continue
        if (path / PINNED).exists():
            entry.files[PINNED] = None  # type: ignore[assignment]
    return found


class Mirror:
    """See the module's docstring. `sync` and `tidy_folder` may be called from different threads."""

    def __init__(self, folder: Path, store: CheckpointStore, rule: Rule, say: Say = lambda event, **facts: None) -> None:
        self.folder, self.store, self.rule, self.say = folder, store, rule, say
        self._lock = threading.Lock()
        self._held: int | None = None  # the step being uploaded
        self._newest: int | None = None  # written last, as told; an upload may end long after it began
        self._damaged: dict[int, bytes] = {}  # local ones that are not what their manifest (this one) says
        self._proven: dict[int, bytes] = {}  # manifests of what was read back from storage

    # The folder ------------------------------------------------------------------------------------------------------

    @property
    def damaged(self) -> bool:
        """Whether the folder has one that cannot be stored."""
        return bool(self._damaged)

    def tidy_folder(self, newest: int) -> None:
        """Delete what may go, now that `newest` is written."""
        with self._lock:
            self._newest = newest
            self._remove_what_may_go()

    def _remove_what_may_go(self) -> None:
        """Called with the lock. What was written after the newest we know of is none of ours: its "saved" is on the way."""
        assert self._newest is not None, "nothing was saved yet"
        folders = dict(local_folders(self.folder))
        written = {step: path.stat().st_mtime_ns for step, path in folders.items()}
        since = written.get(self._newest)
        if since is None:
            return
        found = read_local(self.folder).items()
        known = {step: entry for step, entry in found if step <= self._newest or written.get(step, since) < since}
        for step in self.rule(known, self._newest) & folders.keys() - {self._held}:
            with suppress(OSError):
                (folders[step] / MANIFEST).unlink()
            shutil.rmtree(folders[step], ignore_errors=True)

    # Storage ---------------------------------------------------------------------------------------------------------

    def sync(self, newest: int | None) -> bool:
        """Upload one checkpoint that storage lacks, or tidy up; False: nothing is left to do.

        Args:
            newest: the step written last; None: none since this process began, then nothing is deleted.

        Raises:
            StorageError: try again later.
        """
        local, remote = read_local(self.folder), self.store.listed()
        missing = self._missing(local, remote, newest)
        if missing:
            self._upload(missing[0])
            return True
        if newest is not None and newest in remote:
            self._tidy_storage(local, remote, newest)
        return False

    def _missing(self, local: dict[int, Listed], remote: dict[int, Listed], newest: int | None) -> list[int]:
        """Steps to upload, newest first."""
        here = {step: entry for step, entry in local.items() if (m := entry.manifest) and self._damaged.get(step) != m.text}
        if not here:
            return []
        there = {step: entry for step, entry in remote.items() if entry.fault is None}
        newest = max(here) if newest is None or newest not in here else newest
        wanted = set(here) - self.rule({**there, **here}, newest)

        def same(step: int) -> bool:
            mine, its = here[step].manifest, there[step].manifest if step in there else None
            return mine is not None and its is not None and mine.text == its.text

        return sorted((step for step in wanted if not same(step)), key=lambda step: (step == newest, step), reverse=True)

    def _upload(self, step: int) -> None:
        source = next(path for known, path in local_folders(self.folder) if known == step)
        with self._lock:
            self._held = step
        began = time.monotonic()
        try:
            self._proven.pop(step, None)
            progress = lambda done, total: self.say("progress", step=step, done=done, total=total)  # noqa: E731
            manifest = self.store.upload(step, source, progress)
        except Damaged as error:
            self._damaged[step] = (source / MANIFEST).read_bytes()
            self.say("damaged", step=step, error=str(error))
            return
        except NotStored as error:  # it went while we looked
            self.say("passed", step=step, error=str(error))
            if source.exists():
                raise
            return
        finally:
            with self._lock:
                self._held = None
                if self._newest is not None:
                    self._remove_what_may_go()
        self.say("stored", step=step, uri=self.store.uri(step), bytes=manifest.size, seconds=time.monotonic() - began)

    def _tidy_storage(self, local: dict[int, Listed], remote: dict[int, Listed], newest: int) -> None:
        whole = {step: entry for step, entry in remote.items() if entry.fault is None}
        gone = self.rule(whole, newest) if newest in whole else set()
        # What an upload that was never finished has left, of steps that are not uploaded any more.
        gone |= {step for step, e in remote.items() if MANIFEST not in e.files and step < newest and step not in local}
        if not gone:
            return
        entry = whole.get(newest)
        if entry is None or entry.manifest is None:
            return
        if self._proven.get(newest) != entry.manifest.text:
            if (why := self.store.verify(entry)) is not None:
                self.store.remove(entry)  # the folder still has it: it is stored anew
                raise StorageError(f"{self.store.uri(newest)} is not what was stored ({why}); it is stored again")
            self._proven[newest] = entry.manifest.text
        for step in sorted(gone):
            self.store.remove(remote[step])
            self.say("removed", step=step)
        # Nothing is under way now, so what lies half sent is of steps that went before they were stored.
        self.store.storage.discard_unfinished(PREFIX)


class _Worker(threading.Thread):
    """Calls `sync` until nothing is left, after every `wake`; tries again by itself after a failure."""

    def __init__(self, mirror: Mirror, say: Say) -> None:
        super().__init__(name="mirror", daemon=True)
        self.mirror, self.say = mirror, say
        self.newest: int | None = None
        self.finishing = False
        self._wake = threading.Event()
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def run(self) -> None:
        pause = FIRST_PAUSE_S
        failed = False
        while True:
            woken = self._wake.wait(pause if failed else None)
            self._wake.clear()
            if woken:
                pause = FIRST_PAUSE_S
            finishing = self.finishing
            try:
                while self.mirror.sync(self.newest):
                    pass
                failed = False
            except Exception as error:
                failed = True
                known = isinstance(error, StorageError)
                self.say("failed", error=str(error) if known else f"{type(error).__name__}: {error}", retry_s=pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                if finishing and isinstance(error, StorageRefused):
                    os._exit(1)  # trying again is of no use, and somebody waits
                continue
            if not self._wake.is_set():
                self.say("idle")
                if finishing:
                    os._exit(1 if self.mirror.damaged else 0)


def serve(make_rule: Callable[[dict[str, Any]], Rule]) -> int:
    """The process: its first line on stdin is {"folder", "uri", "options", "rule"}, then comes one for each thing that happens.

    Exit code 0: told to finish, and everything is stored.
    """
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.nice(5)
    for number in (signal.SIGTERM, signal.SIGINT):  # these are for the trainer, which tells us by closing the pipe
        signal.signal(number, signal.SIG_IGN)
    lock = threading.Lock()

    def say(event: str, **facts: Any) -> None:
        with lock:
            print(json.dumps({"event": event, **facts}), flush=True)

    asked = json.loads(sys.stdin.readline())
    folder = Path(asked["folder"])
    store = CheckpointStore(open_storage(asked["uri"], Options(**asked["options"])))
    mirror = Mirror(folder, store, make_rule(asked["rule"]), say)
    worker = _Worker(mirror, say)
    worker.start()
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        if word == "saved":
            mirror.tidy_folder(int(value))
            worker.newest = int(value)
        elif word == "finish":
            worker.finishing = True
        worker.wake()
    os._exit(1)  # the parent is gone, or has waited long enough
