"""Books: texts joined end to end and cut, through a token cache that outlives kills and is shared by processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.tiny_model import build_tokenizer
from tests.support.waiting import wait_until
from trainers.books.cache import Encoder, make_plan, open_shards
from trainers.books.sequences import Books, open_books
from trainers.books.texts import open_texts
from trainers.config_parts import DatasetConfig
from trainers.config_sft import BooksConfig, SFTConfig
from trainers.errors import DatasetError

WORDS = ["the", "sea", "was", "calm", "and", "we", "had", "no", "wind"]


def write_books(folder: Path, count: int = 7, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(1, 60)))) for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    return texts


def joined(texts: list[str], tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all texts, each ended by <eos>, and the position of each within its text: token by token."""
    ids, positions = [], []
    for text in texts:
        own = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids += own
        positions += range(len(own))
    return np.array(ids), np.array(positions)


def books(folder: Path, cache: Path, length: int, **fields) -> Books:
    config = BooksConfig(cache_dir=str(cache), **fields)
    return open_books(config, DatasetConfig(path=str(folder)), build_tokenizer(), length)


@pytest.mark.parametrize("shard_size", [1, 100, 10_000])
@pytest.mark.parametrize("length", [2, 37, 64, 100_000])
def test_sequences_are_the_joined_texts_cut(tmp_path, length, shard_size):
    texts, tokenizer = write_books(tmp_path / "books"), build_tokenizer()
    ids, positions = joined(texts, tokenizer)
    shards, content = open_shards(
        open_texts(DatasetConfig(path=str(tmp_path / "books")), "text"), tokenizer, tmp_path / "cache", 2, shard_size=shard_size
    )
    found = Books(shards, content, length, "books")
    rows = [found[i] for i in range(len(found))]
    kept = found.tokens - found.dropped_tokens
    assert found.tokens == len(ids) and found.dropped_tokens == (len(ids) % length == 1) and found.books == len(texts)
    assert all(len(row["token_ids"]) == length for row in rows[:-1])
    np.testing.assert_array_equal(np.concatenate([row["token_ids"] for row in rows]), ids[:kept])
    np.testing.assert_array_equal(np.concatenate([row["book_positions"] for row in rows]), positions[:kept])
    assert all(row[name].dtype == np.int32 for row in rows for name in found.columns)
    with pytest.raises(IndexError):
        found[len(found)]


def test_what_is_left_over_is_kept_or_dropped_and_told(tmp_path, caplog):
    write_books(tmp_path / "books")
    caplog.set_level("INFO")
    kept = books(tmp_path / "books", tmp_path / "cache", 100)
    assert f"{kept.tokens % 100} left over at the end are a shorter sequence" in caplog.text
    dropped = books(tmp_path / "books", tmp_path / "cache", 100, last_sequence="drop")
    assert f"{kept.tokens % 100} left over at the end are dropped" in caplog.text
    assert len(kept) == len(dropped) + 1 and len(kept[len(kept) - 1]["token_ids"]) == kept.tokens % 100
    assert kept.fingerprint() != dropped.fingerprint()
    with pytest.raises(DatasetError, match=f"has {kept.tokens} tokens: not one sequence of max_length=100000"):
        books(tmp_path / "books", tmp_path / "cache", 100_000, last_sequence="drop")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "parquet", "given"])
def test_every_kind_of_input_gives_the_same_tokens(tmp_path, kind):
    texts = [*write_books(tmp_path / "books"), "caf\u00e9 \u2028 line"]  # a separator that is no end of line in JSON
    (tmp_path / "books" / "99.txt").write_text(texts[-1])
    rows = [{"title": str(number), "text": text} for number, text in enumerate(texts)]
    path, given = tmp_path / f"books.{kind}", None
    if kind == "txt":
        path = tmp_path / "books"
    elif kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        given = rows
    config = BooksConfig(cache_dir=str(tmp_path / "cache"))
    found = open_books(config, DatasetConfig(path=str(path)), build_tokenizer(), 50, given=given)
    ids, _ = joined(texts, build_tokenizer())
    np.testing.assert_array_equal(np.concatenate([found[i]["token_ids"] for i in range(len(found))]), ids)


def test_texts_without_a_character_give_no_token_and_are_no_book(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for name, text in (("a", ""), ("b", "sea"), ("c", " \n"), ("d", "calm")):
        (folder / f"{name}.txt").write_text(text)
    found = books(folder, tmp_path / "cache", 100)
    assert (found.books, found[0]["book_positions"].tolist()) == (2, [0, 1, 2, 3, 0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has no .txt files"),
        (lambda folder: (folder / "a.txt").write_bytes(b"ab\xff"), "a.txt is not UTF-8 at byte 2"),
        (lambda folder: (folder / "a.txt").write_text("  "), "has 0 tokens.*give texts with words"),
        (lambda folder: (folder / "a.txt").symlink_to(folder / "gone"), "a.txt cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(tmp_path, make, message):
    folder = tmp_path / "books"
    folder.mkdir()
    make(folder)
    with pytest.raises(DatasetError, match=message):
        books(folder, tmp_path / "cache", 10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"title": "x"}', "row 2: there is no `text`; it has: title"),
        (r'{"text": "ab\ud800"}', "row 2: `text` has half of a surrogate pair at character 3"),
        ('{"text": 3}', "row 2: `text` holds a int"),
        ("{", "row 2"),
    ],
)
def test_a_row_without_a_text_is_said_with_its_number(tmp_path, line, message):
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(DatasetError, match=message):
        books(path, tmp_path / "cache", 10)
    with pytest.raises(
        DatasetError, match=r"no column `body`; it has: text. Name the one with the texts in `books.text_column`"
    ):
        config = BooksConfig(cache_dir=str(tmp_path / "cache"), text_column="body")
        open_books(config, DatasetConfig(path="-"), build_tokenizer(), 10, given=[{"text": "a"}])


# The cache ----------------------------------------------------------------------------------------------------------------


def files(cache: Path) -> dict[str, int]:
    return {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in cache.rglob("*.tokens")}


def test_a_second_run_and_another_length_read_what_is_there(tmp_path, monkeypatch):
    write_books(tmp_path / "books")
    first = books(tmp_path / "books", tmp_path / "cache", 20)
    before = files(tmp_path / "cache")
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: pytest.fail("tokenized again"))
    again = books(tmp_path / "books", tmp_path / "cache", 20)
    assert again.fingerprint() == first.fingerprint() and files(tmp_path / "cache") == before
    assert books(tmp_path / "books", tmp_path / "cache", 30).fingerprint() != first.fingerprint()


def test_only_shards_with_changed_texts_are_made_again(tmp_path):
    folder, cache, tokenizer = tmp_path / "books", tmp_path / "cache", build_tokenizer()
    write_books(folder)

    def made() -> tuple[set[str], str]:
        texts = open_texts(DatasetConfig(path=str(folder)), "text")
        _, content = open_shards(texts, tokenizer, cache, shard_size=1)
        return set(files(cache)), content

    before, content = made()
    (folder / "99.txt").write_text("we had wind")
    added, other = made()
    assert len(before) == 7 and len(added - before) == 1 and content != other
    (folder / "99.txt").unlink()
    assert made() == (added, content)
    tokenizer.add_tokens(["sea"])
    assert len(made()[0]) == 15, "another tokenizer has files of its own"


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "books"
    write_books(folder)
    texts = open_texts(DatasetConfig(path=str(folder)), "text")
    make_plan(texts, tmp_path / "cache")
    (folder / "03.txt").write_text("something else")
    with pytest.raises(DatasetError, match="text 4 has changed"):
        open_shards(texts, build_tokenizer(), tmp_path / "cache")


def test_a_change_that_neither_size_nor_time_shows_is_refused_once(tmp_path):
    folder, cache = tmp_path / "books", tmp_path / "cache"
    write_books(folder)
    books(folder, cache, 10)
    file = folder / "03.txt"
    before = file.stat()
    file.write_text(file.read_text()[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for shard in cache.rglob("*.tokens"):
        shard.unlink()
    with pytest.raises(DatasetError, match="text 4 has changed"):
        books(folder, cache, 10)
    assert books(folder, cache, 10).books == 7


@pytest.mark.parametrize("left", [b"", b"PK\x03\x04", b"something else"])
def test_a_damaged_plan_is_made_again(tmp_path, left):
    write_books(tmp_path / "books")
    whole = books(tmp_path / "books", tmp_path / "cache", 10).fingerprint()
    (plan,) = (tmp_path / "cache").rglob("*.npz")
    plan.write_bytes(left)
    assert books(tmp_path / "books", tmp_path / "cache", 10).fingerprint() == whole
    with np.load(plan) as stored:
        assert len(stored["sizes"]) == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": {"path": "d", "messages_column": "messages"}}, "leave it or `books` out"),
        ({"token_budget": 100}, "token_budget=100 is less than one sequence of books"),
        ({"gradient_checkpointing_kwargs": {"ofload": True}}, "unknown argument `ofload`: did you mean `offload`"),
    ],
)
def test_options_that_books_cannot_go_by_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        SFTConfig.model_validate({"model": "m", "dataset": {"path": "d"}, "books": {}, **fields})


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path):
    write_books(tmp_path / "books")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"Set books.cache_dir"):
        books(tmp_path / "books", tmp_path / "file" / "cache", 10)


@pytest.mark.parametrize("damage", [lambda whole: whole[:-3], lambda whole: np.array([1, 1 << 60], np.int64).tobytes()])
def test_a_damaged_file_is_named(tmp_path, damage):
    write_books(tmp_path / "books")
    books(tmp_path / "books", tmp_path / "cache", 10)
    (path,) = (tmp_path / "cache").rglob("*.tokens")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=f"{path} is damaged: delete it"):
        books(tmp_path / "books", tmp_path / "cache", 10)


SLOW = """
    import sys, time
    sys.modules["torch"] = None  # a tokenizer needs none, and it takes seconds
    from pathlib import Path
    from tests.support.tiny_model import build_tokenizer
    from trainers.books import cache
    from trainers.books.texts import open_texts
    from trainers.config_parts import DatasetConfig

    folder, store, delay_s, hangs_at = sys.argv[1:]
    count, encode = 0, cache.Encoder.encode

    def slow(self, texts):
        for ids in encode(self, texts):
            global count
            count += 1
            print("encoded", flush=True)
            time.sleep(1000 if count == int(hangs_at) else float(delay_s))
            yield ids

    cache.Encoder.encode = slow
    texts = open_texts(DatasetConfig(path=folder), "text")
    shards, content = cache.open_shards(texts, build_tokenizer(), Path(store), 1, shard_size=150)
    print("done", content, flush=True)
"""


def tokenizing(folder: Path, cache: Path, delay_s: float = 0.0, hangs_at: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SLOW), str(folder), str(cache), str(delay_s), str(hangs_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_after(process: subprocess.Popen[str], texts: int) -> None:
    """SIGKILL once it has said that many times that it has encoded a text."""
    with process:
        try:
            assert process.stdout is not None
            for _ in range(texts):
                assert process.stdout.readline()
        finally:
            process.send_signal(signal.SIGKILL)


def test_after_a_kill_finished_shards_are_kept_and_half_ones_made_again(tmp_path):
    folder, cache = tmp_path / "books", tmp_path / "cache"
    write_books(folder, 24)
    _, whole = open_shards(
        open_texts(DatasetConfig(path=str(folder)), "text"), build_tokenizer(), tmp_path / "one", shard_size=150
    )
    kill_after(tokenizing(folder, cache, hangs_at=11), 11)
    before, total = files(cache), len(files(tmp_path / "one"))
    assert 0 < len(before) < total and list(cache.rglob("*.partial")), "killed in the middle of a shard"
    resumed = tokenizing(folder, cache)
    output, _ = resumed.communicate(timeout=60)
    after = files(cache)
    assert output.splitlines()[-1] == f"done {whole}" and output.count("encoded") < 24
    assert {name: after[name] for name in before} == before and len(after) == total
    assert not list(cache.rglob("*.partial"))
    for name in after:
        assert (cache / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_processes_at_once_share_the_work(tmp_path):
    folder, cache = tmp_path / "books", tmp_path / "cache"
    write_books(folder, 24)
    processes = [tokenizing(folder, cache, delay_s=0.02) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum(output.count("encoded") for output in outputs) == 24, "no text is tokenized twice"
    assert not list(cache.rglob("*.partial"))


def test_a_process_that_waits_for_one_that_dies_takes_over(tmp_path):
    folder, cache = tmp_path / "books", tmp_path / "cache"
    write_books(folder, 6)
    texts = open_texts(DatasetConfig.model_validate({"path": str(folder)}), "text")
    shards = len(make_plan(texts, tmp_path / "plan", 150).shards)
    assert shards > 1
    with tokenizing(folder, cache, hangs_at=1) as killed:
        try:
            assert killed.stdout is not None and killed.stdout.readline()  # it holds its first shard from now on
            waiting = tokenizing(folder, cache)
            wait_until(lambda: len(files(cache)) == shards - 1, 60)  # all others are made
            assert waiting.poll() is None
        finally:
            killed.send_signal(signal.SIGKILL)
    output, _ = waiting.communicate(timeout=60)
    assert output.splitlines()[-1].startswith("done ") and waiting.returncode == 0
    assert len(files(cache)) == shards and not list(cache.rglob("*.partial"))
