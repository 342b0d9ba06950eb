"""Datasets, fingerprints, prompts and recorded completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import CharTokenizer, fake_config
from trainers.config import SFTConfig
from trainers.config_parts import DatasetConfig
from trainers.data import PromptBuilder, Rows, check_columns, load_rows
from trainers.errors import DatasetError

ROWS = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(5)]


def write(path: Path, rows: list[dict[str, Any]]) -> DatasetConfig:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return DatasetConfig(path=str(path))


def test_jsonl_json_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    jsonl = load_rows(write(tmp_path / "a.jsonl", ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    whole = load_rows(DatasetConfig(path=str(tmp_path / "a.json")))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    parquet = load_rows(DatasetConfig(path=str(tmp_path / "a.parquet")))
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "folder")
    folder = load_rows(DatasetConfig(path=str(tmp_path / "folder")))
    for rows in (jsonl, whole, parquet, folder):
        assert len(rows) == 5 and rows[3] == ROWS[3] and rows.fingerprint() == jsonl.fingerprint()
    assert len(load_rows(DatasetConfig(path=str(tmp_path / "a.jsonl"), max_rows=2))) == 2


def test_a_json_line_may_hold_every_line_separator_that_json_allows(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b\u0085c\u2029", "answer": "1"}, {"prompt": "d", "answer": "2"}]
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode())
    assert [dict(row) for row in load_rows(DatasetConfig(path=str(path)))._rows] == rows


def test_the_fingerprint_is_that_of_the_content() -> None:
    rows = Rows(ROWS, "a")
    assert Rows([dict(row) for row in ROWS], "b").fingerprint() == rows.fingerprint()
    changed = [*ROWS[:4], {"prompt": "4+4", "answer": "9"}]
    prints = {Rows(ROWS[:4], "a").fingerprint(), Rows(changed, "a").fingerprint(), rows.fingerprint()}
    prints.add(Rows(ROWS[::-1], "a").fingerprint())
    assert len(prints) == 4


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"there is no file .*gone\.jsonl"):
        load_rows(DatasetConfig(path=str(tmp_path / "gone.jsonl")))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{oops}\n')
    with pytest.raises(DatasetError, match="line 2"):
        load_rows(DatasetConfig(path=str(tmp_path / "bad.jsonl")))
    with pytest.raises(DatasetError, match="has no rows"):
        load_rows(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DatasetError, match=r"no column `completion`; it has: prompt, answer"):
        check_columns(Rows(ROWS, "rows"), SFTConfig(model="m", dataset=DatasetConfig(path="x")))


def test_prompts_are_rendered_with_system_prompt_and_generation_mark() -> None:
    config = fake_config(dataset={"path": "x", "system_prompt": "S"})
    prompt = PromptBuilder(CharTokenizer(), config).prompt(1, 2, ROWS[2])
    assert CharTokenizer().decode(prompt.token_ids.tolist()) == "<S<2+2>"
    assert (prompt.id, prompt.columns) == ("1:2", {"answer": "4"})
    assert prompt.messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    prompt = PromptBuilder(CharTokenizer(), fake_config()).prompt(0, 0, {"prompt": messages})
    assert CharTokenizer().decode(prompt.token_ids.tolist()) == "<a>b$\n<c>"
    with pytest.raises(DatasetError, match="column `prompt` holds 7"):
        PromptBuilder(CharTokenizer(), fake_config()).messages({"prompt": 7})


class NoEndTokenizer(CharTokenizer):
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        return super().apply_chat_template(*args, **kwargs).replace("$\n", "\n")


class RewritingTokenizer(CharTokenizer):
    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return str(len(messages)) + super().apply_chat_template(messages, **kwargs)


class PlainTokenizer(CharTokenizer):
    chat_template = None


@pytest.mark.parametrize(
    ("tokenizer", "completion", "expected"),
    [
        (CharTokenizer(), "4", "4$"),  # the newline after the end of turn is not part of the answer
        (CharTokenizer(), [{"role": "assistant", "content": "4"}], "4$"),
        (CharTokenizer(), "", "$"),
        (NoEndTokenizer(), "4", "4\n$"),
        (PlainTokenizer(), "4", "4$"),
    ],
)
def test_a_recorded_completion_ends_with_its_end_of_turn(tokenizer: Any, completion: Any, expected: str) -> None:
    config = SFTConfig(model="m", dataset=DatasetConfig(path="x"))
    builder = PromptBuilder(tokenizer, config)
    row = {"prompt": "2+2", "completion": completion}
    messages, ids = builder.completion_ids(builder.prompt(0, 0, row), row)
    assert tokenizer.decode(ids.tolist()) == expected and messages[-1]["role"] == "assistant"


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    builder = PromptBuilder(RewritingTokenizer(), SFTConfig(model="m", dataset=DatasetConfig(path="x")))
    row = {"prompt": "2+2", "completion": "4"}
    with pytest.raises(DatasetError, match="does not render the prompt as a prefix"):
        builder.completion_ids(builder.prompt(0, 0, row), row)
