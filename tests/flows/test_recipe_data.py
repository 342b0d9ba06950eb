"""The joined prompts of a recipe, and what its page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.recipe_config import RecipeConfig
from flows.recipe_data import join
from flows.recipe_report import kept, markdown, summary
from flows.recipe_tracking import by_stage
from tests.flows.test_recipe_config import recipe
from trainers.config_parts import DatasetConfig
from trainers.errors import DatasetError


def write(path: Path, rows: list[dict]) -> DatasetConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(path))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_of_all_domains_are_spread_evenly_each_with_its_teacher(tmp_path: Path):
    many = write(tmp_path / "many.jsonl", [{"prompt": f"m{i}", "answer": "x"} for i in range(6)])
    few = write(tmp_path / "few.jsonl", [{"prompt": f"f{i}"} for i in range(2)])
    found = join({"many": many, "few": few}, tmp_path / "out" / "prompts.jsonl")
    rows = read(Path(found["path"]))
    assert found["rows"] == {"many": 6, "few": 2}
    assert [row["prompt"] for row in rows if row["teacher_id"] == "many"] == [f"m{i}" for i in range(6)]
    assert [row["teacher_id"][0] for row in rows] == list("mmfmmmfm")  # at 1/4 and 3/4, after a row of the other's there
    assert all(set(row) == {"prompt", "teacher_id"} for row in rows)


def test_the_same_data_give_the_same_file_and_other_data_another_fingerprint(tmp_path: Path):
    one = write(tmp_path / "one.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    two = write(tmp_path / "two.jsonl", [{"prompt": "c"}])
    first = join({"one": one, "two": two}, tmp_path / "prompts.jsonl")
    text = (tmp_path / "prompts.jsonl").read_bytes()
    (tmp_path / "prompts.jsonl").unlink()
    assert join({"one": one, "two": two}, tmp_path / "prompts.jsonl") == first
    assert (tmp_path / "prompts.jsonl").read_bytes() == text
    write(tmp_path / "two.jsonl", [{"prompt": "d"}])
    assert join({"one": one, "two": two}, tmp_path / "prompts.jsonl")["fingerprint"] != first["fingerprint"]


def test_a_domains_system_message_and_columns_become_part_of_the_prompt(tmp_path: Path):
    chat = [{"role": "user", "content": "hello"}]
    plain = write(tmp_path / "plain.jsonl", [{"question": "1+1"}])
    plain = plain.model_copy(update={"prompt_column": "question", "system_prompt": "Be brief."})
    talk = write(tmp_path / "talk.jsonl", [{"prompt": chat}, {"prompt": chat}]).model_copy(update={"max_rows": 1})
    rows = {row["teacher_id"]: row["prompt"] for row in read(Path(join({"a": plain, "b": talk}, tmp_path / "p.jsonl")["path"]))}
    assert rows == {"a": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}], "b": chat}


def test_a_domain_without_prompts_is_refused_and_leaves_no_file(tmp_path: Path):
    good = write(tmp_path / "good.jsonl", [{"prompt": "a"}])
    bad = write(tmp_path / "bad.jsonl", [{"question": "a"}])
    with pytest.raises(DatasetError, match="no column `prompt`"):
        join({"good": good, "bad": bad}, tmp_path / "prompts.jsonl")
    empty = write(tmp_path / "empty.jsonl", [{"prompt": ""}])
    with pytest.raises(DatasetError, match="domain empty, row 0"):
        join({"good": good, "empty": empty}, tmp_path / "prompts.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "empty.jsonl", "good.jsonl"]


ACCURACIES = {
    "base": {"add": 0.0, "order": 0.0},
    "sft": {"add": 0.5, "order": 0.4},
    "add": {"add": 0.9, "order": 0.3},
    "order": {"add": 0.2, "order": 0.8},
    "merged": {"add": 0.88, "order": 0.8},
}


def test_the_gain_that_the_student_keeps():
    assert kept(ACCURACIES, "add") == pytest.approx(0.95) and kept(ACCURACIES, "order") == pytest.approx(1.0)
    assert kept({**ACCURACIES, "add": {"add": 0.5}}, "add") is None  # nothing was gained
    assert kept({name: ACCURACIES[name] for name in ("sft", "add")}, "add") is None  # not merged yet


def test_the_page_has_every_model_by_domain():
    config = RecipeConfig.model_validate(recipe())
    page = markdown(config, ACCURACIES, {"r-sft": "FINISHED"}).splitlines()
    assert page[2] == "| model | add | order |"
    assert page[4:10] == [
        "| base | 0.000 | 0.000 |",
        "| SFT | 0.500 | 0.400 |",
        "| specialist of add | **0.900** | 0.300 |",
        "| specialist of order | 0.200 | **0.800** |",
        "| merged student | 0.880 | 0.800 |",
        "| gain kept | 95% | 100% |",
    ]
    assert "| r-sft | FINISHED |" in page
    assert summary(config, {})["accuracy"] == {name: {} for name in ACCURACIES}
    unfinished = markdown(config, {"sft": {"add": 0.5}}, {}).splitlines()
    assert "| SFT | 0.500 |  |" in unfinished and "| gain kept |  |  |" in unfinished


def test_the_curves_in_mlflow_follow_each_domain_through_its_own_specialist():
    config = RecipeConfig.model_validate(recipe())
    assert by_stage(config, ACCURACIES) == [
        {"add": 0.0, "order": 0.0},
        {"add": 0.5, "order": 0.4},
        {"add": 0.9, "order": 0.8},
        {"add": 0.88, "order": 0.8},
    ]
    assert by_stage(config, {"sft": {"add": 0.5}, "add": {"add": 0.9}}) == [{}, {"add": 0.5}, {"add": 0.9}, {}]
