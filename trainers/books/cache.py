"""Tokens of texts on disk, made once and then mapped into memory. NumPy only.

    texts ─▶ plan: digest and size of each ─▶ shards of about `SHARD_SIZE` ─▶ threads: text ─▶ ids ─▶ <shard>.tokens
    <cache>/<tokenizer>/<shard>.tokens       shard = hash of tokenizer and texts; int64 [2 + D] header, then int32 tokens

Invariants:
- a file `<shard>.tokens` is whole: it is written as `<shard>.partial` and renamed. What a kill leaves half done is done again,
  and nothing else;
- the `.partial` file is also the lock: several processes may open the same books at once, each shard is made by one of them,
  and the kernel frees the lock of one that dies;
- a shard is found by what is in it, so books that are added, taken out or moved cost the shards they are in, and no others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainers.books.texts import Texts
from trainers.errors import DatasetError
from trainers.rollouts.chat import backend_of

logger = logging.getLogger(__name__)
FORMAT = 1
SHARD_SIZE = 1 << 19  # characters; the last text of a shard may go beyond
BATCH = 64  # texts given to the tokenizer at a time
_DIGEST = 16


def default_folder() -> Path:
    """Where tokens are kept unless `books.cache_dir` says otherwise."""
    return Path(os.environ.get("LOOPWRIGHT_HOME") or "~/.loopwright").expanduser().absolute() / "token_cache"


@dataclass(frozen=True, slots=True)
class Plan:
    """Of each text its digest [D, 16] and its size in characters [D]; `shards` are half-open ranges of texts."""

    digests: np.ndarray
    sizes: np.ndarray
    shards: list[tuple[int, int]]
    kept: Path | None = None  # the file that keeps it


class Encoder:
    """Texts to ids, each ended by the tokenizer's end of text where it has one. Threads may share it.

    `key` is a hash of all that the ids depend on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.end = np.array([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], np.int32)
        backend = backend_of(tokenizer)
        if backend is None:
            parts: Any = [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)]
            self._encode: Callable[[list[str]], Iterable[list[int]]] = lambda texts: tokenizer(texts, add_special_tokens=False)[
                "input_ids"
            ]
        else:
            # A copy: padding and truncation of the tokenizer itself are anyone's to set.
            own = type(backend).from_str(parts := backend.to_str())
            self._encode = lambda texts: (one.ids for one in own.encode_batch_fast(texts, add_special_tokens=False))
        self.key = hashlib.sha256(json.dumps([FORMAT, self.end.tolist(), parts], default=str).encode()).hexdigest()[:16]

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """int32 ids of each text; of one without a visible character, none at all."""
        written = [text for text in texts if text.strip()]
        ids = iter(self._encode(written)) if written else iter(())
        for text in texts:
            yield np.concatenate([np.array(next(ids), np.int32), self.end]) if text.strip() else self.end[:0]


class Shard:
    """A finished file: `lengths` int64 [D] of its texts in tokens, and the tokens, mapped when they are asked for."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            head = np.fromfile(stream, np.int64, 2)
            if len(head) < 2 or head[0] != FORMAT:
                raise DatasetError(f"{path} is no token file of this version: delete it, and it is made again")
            texts = int(head[1])
            self.lengths = np.fromfile(stream, np.int64, texts if 0 <= texts <= size // 8 else 0)
        self.path, self.size = path, int(self.lengths.sum())
        if len(self.lengths) != texts or size != 8 * (2 + texts) + 4 * self.size:
            raise DatasetError(f"{path} is damaged: delete it, and it is made again")

    def read(self, start: int, stop: int) -> np.ndarray:
        """int32 tokens [start, stop), a copy. The mapping ends with the call: there may be more shards than open files."""
        mapped = np.memmap(self.path, np.int32, "r", offset=8 * (2 + len(self.lengths)), shape=(self.size,))
        return np.array(mapped[start:stop])


def make_plan(texts: Texts, folder: Path, shard_size: int = SHARD_SIZE) -> Plan:
    """Read every text once, unless a plan of the same `stamp` was kept; raises `DatasetError` for one that cannot be read."""
    kept = None
    if texts.stamp is not None:
        kept = folder / "plans" / f"{hashlib.sha256(texts.stamp.encode()).hexdigest()[:32]}.npz"
        if (stored := _kept_plan(kept, len(texts))) is not None:
            return _grouped(*stored, shard_size, kept)
    digests, sizes = np.zeros((len(texts), _DIGEST), np.uint8), np.zeros(len(texts), np.int64)
    for index in range(len(texts)):
        text = texts.text(index)
        digests[index] = np.frombuffer(_digest_of(text), np.uint8)
        sizes[index] = len(text)
    if kept is not None:
        with _as_new_file(kept) as stream:
            np.savez(stream, digests=digests, sizes=sizes)
    return _grouped(digests, sizes, shard_size, kept)


def _kept_plan(path: Path, texts: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Digests and sizes; None: there is no such file, or it is damaged and has to be made again."""
    if not path.is_file():
        return None
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as stored:
            digests, sizes = stored["digests"], stored["sizes"]
    except Exception as error:  # whatever zipfile and NumPy say of a file that is none of theirs
        logger.warning("%s is damaged (%s) and is made again", path, error)
        return None
    return (digests, sizes) if digests.shape == (texts, _DIGEST) and sizes.shape == (texts,) else None


def _grouped(digests: np.ndarray, sizes: np.ndarray, shard_size: int, kept: Path | None) -> Plan:
    """Whole texts, in order, until a shard has `shard_size`."""
    shards: list[tuple[int, int]] = []
    start = 0
    while start < len(sizes):
        ends = np.cumsum(sizes[start : start + 100_000])
        stop = start + min(int(np.searchsorted(ends, shard_size)) + 1, len(ends))
        shards.append((start, stop))
        start = stop
    return Plan(digests, sizes, shards, kept)


def open_shards(
    texts: Texts,
    tokenizer: Any,
    folder: Path,
    workers: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    shard_size: int = SHARD_SIZE,
) -> tuple[list[Shard], str]:
    """The tokens of all texts, in order, and the hash of tokenizer and content. What is not in `folder` yet is made.

    Args:
        workers: threads that tokenize; None: one per core. A fast tokenizer works outside the interpreter's lock.
        say: told how far it is.

    Raises:
        DatasetError: a text cannot be read, or the cache cannot be written.
    """
    try:
        say(f"reading {texts.source}")
        plan = make_plan(texts, folder, shard_size)
        encoder = Encoder(tokenizer)
        own = folder / encoder.key
        own.mkdir(parents=True, exist_ok=True)
        names = [hashlib.sha256(encoder.key.encode() + plan.digests[a:b].tobytes()).hexdigest()[:32] for a, b in plan.shards]
        paths = [own / f"{name}.tokens" for name in names]
        _make_missing(texts, encoder, plan, paths, workers or os.cpu_count() or 1, say)
        return [Shard(path) for path in paths], hashlib.sha256("".join(names).encode()).hexdigest()[:16]
    except OSError as error:
        raise DatasetError(
            f"the token cache {folder} cannot be used: {error}. Set books.cache_dir to a folder with room for 4 bytes per token"
        ) from error


def _make_missing(
    texts: Texts, encoder: Encoder, plan: Plan, paths: list[Path], workers: int, say: Callable[[str], None]
) -> None:
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    if not missing:
        return
    logger.info("%s: tokenizing %d of %d shards with %d threads", texts.source, len(missing), len(paths), workers)
    # What another process is making right now comes last: by then it is done, or that process is dead.
    busy: list[int] = []
    with ThreadPoolExecutor(workers, "tokenize") as pool:
        for wait in (False, True):
            tasks = {pool.submit(_make, texts, encoder, plan, i, paths[i], wait): i for i in (busy if wait else missing)}
            try:
                for number, task in enumerate(as_completed(tasks), 1):
                    if not task.result():
                        busy.append(tasks[task])
                    say(f"tokenizing {texts.source}: {number} of {len(tasks)} shards")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _checked(texts: Texts, plan: Plan, span: range) -> list[str]:
    """These texts, which are those that were planned with."""
    found = [texts.text(index) for index in span]
    for index, text in zip(span, found, strict=True):
        if _digest_of(text) != plan.digests[index].tobytes():
            if plan.kept is not None:  # the text may have been changed without another size or time
                plan.kept.unlink(missing_ok=True)
            raise DatasetError(f"{texts.source}: text {index + 1} has changed since it was first read: start the run again")
    return found


def _digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=_DIGEST).digest()


def _make(texts: Texts, encoder: Encoder, plan: Plan, number: int, path: Path, wait: bool) -> bool:
    """Write one shard, unless it is there by now. False: another process is at it, and `wait` was not asked for."""
    span = plan.shards[number]
    partial = path.with_suffix(".partial")
    with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        if path.exists():  # the file that was waited for may be the finished one, under its old name
            if partial.exists() and not os.path.samestat(os.stat(partial), os.stat(path)):
                partial.unlink(missing_ok=True)
            return True
        stream.truncate(0)
        stream.write(np.zeros(2 + span[1] - span[0], np.int64).tobytes())
        lengths: list[int] = []
        for start in range(*span, BATCH):
            for ids in encoder.encode(_checked(texts, plan, range(start, min(start + BATCH, span[1])))):
                lengths.append(len(ids))
                stream.write(ids.tobytes())
        stream.seek(0)
        stream.write(np.array([FORMAT, len(lengths), *lengths], np.int64).tobytes())
        stream.flush()
        os.fsync(stream.fileno())
        os.rename(partial, path)
    return True


@contextmanager
def _as_new_file(path: Path) -> Iterator[Any]:
    """A file that appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
