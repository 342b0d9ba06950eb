"""What is refused before anything is started, and how it is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.config import GRPORunConfig, SFTRunConfig
from flows.config_file import ConfigErrors
from flows.preflight import preflight

Make = Callable[..., GRPORunConfig]


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "lam = lambda completions, **columns: [0.0]\n"
        "def needs_colour(completions, colour, **columns): return [0.0]\n"
        "def fine(completions, answer, **columns): return [0.0]\n"
        "number = 3\n"
    )
    return path


def lines(config: GRPORunConfig | SFTRunConfig) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        preflight(config)
    return caught.value.lines


def test_what_is_all_right_passes(home: Path, config: Make, rewards: Path) -> None:
    preflight(config(reward_funcs=[f"{rewards}:fine"]))


def test_a_lambda_is_a_type_error_that_names_it(home: Path, config: Make, rewards: Path) -> None:
    with pytest.raises(TypeError, match=rf"reward_funcs\.0: `{rewards}:lam` is a lambda: write it as a function with `def`"):
        preflight(config(reward_funcs=[f"{rewards}:lam"]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_x:f", "cannot import `no_such_module_x:f`: ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("trainers.rewards:acuracy_reward", "`trainers.rewards` has no `acuracy_reward`"),
        ("FILE:number", "is a int, which cannot be called"),
        ("nothing", "`nothing` is no import path: write `package.module:name` or `file.py:name`"),
    ],
)
def test_rewards_that_cannot_be_loaded(home: Path, config: Make, rewards: Path, path: str, message: str) -> None:
    (line,) = lines(config(reward_funcs=[path.replace("FILE", str(rewards))]))
    assert line.startswith("reward_funcs.0: ") and message in line


TOOLS = """
def undescribed(a): return a
def add(a: int, b: int) -> int:
    \"\"\"
    Add.

    Args:
        a: One number.
        b: The other.
    \"\"\"
    return a + b
class Room:
    size = 1
    def reset(self, **row): return "1+1="
    def get_reward(self): return 1.0
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": ["FILE:add", "FILE:ad"]}, "tools.1: `FILE` has no `ad`; it has: Room, add, undescribed"),
        ({"tools": ["FILE:undescribed"]}, "tools.0: `FILE:undescribed` has no docstring"),
        ({"environment_factory": "FILE:Rom"}, "environment_factory: `FILE` has no `Rom`"),
        ({"environment_factory": "FILE:Room.size"}, "environment_factory: `FILE:Room.size` is a int: name a class or a"),
        ({"loop_cls": "FILE:Room"}, "loop_cls: `FILE:Room` is no subclass of AsyncRolloutLoop"),
    ],
)
def test_tools_environments_and_loops_that_cannot_be_used(
    home: Path, config: Make, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)

    def placed(value: Any) -> Any:
        return [placed(item) for item in value] if isinstance(value, list) else value.replace("FILE", f"{tmp_path}/my_tools.py")

    (line,) = lines(config(**{name: placed(value) for name, value in given.items()}))
    assert line.startswith(placed(message))


def test_an_environment_may_stand_for_the_prompts(home: Path, config: Make, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "starts.jsonl").write_text('{"start": 1}\n')
    dataset = {"path": str(tmp_path / "starts.jsonl")}
    preflight(config(environment_factory=f"{tmp_path}/my_tools.py:Room", dataset=dataset, reward_funcs=[]))
    (line,) = lines(config(dataset=dataset, reward_funcs=["trainers.rewards:format_reward"]))
    assert "no column `prompt`" in line


def test_missing_columns_are_named_with_those_there_are(home: Path, config: Make, rewards: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    found = lines(config(dataset={"path": str(path), "prompt_column": "question"}, reward_funcs=[f"{rewards}:needs_colour"]))
    assert len(found) == 2
    assert f"dataset: dataset `{path}` has no column `question`; it has: prompt, answer." in found[0]
    assert found[1] == (f"dataset: dataset `{path}` has no column `colour`, which reward_funcs.0 needs; it has: prompt, answer")


def test_the_accuracy_reward_needs_a_reference(home: Path, config: Make, tmp_path: Path) -> None:
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    (line,) = lines(config(dataset={"path": str(tmp_path / "bare.jsonl")}, reward_funcs=["trainers.rewards:accuracy_reward"]))
    assert "has no column `solution` or `answer`, which reward_funcs.0 needs; it has: prompt" in line


def test_a_reward_with_several_forms_needs_the_columns_of_one(home: Path, config: Make, tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text('{"prompt": "f", "test": "check", "inputs": "1"}\n')
    (line,) = lines(config(dataset={"path": str(tmp_path / "code.jsonl")}, reward_funcs=["trainers.rewards:code_reward"]))
    assert "no column `tests` or `test` and `entry_point` or `inputs` and `outputs`, which reward_funcs.0 needs" in line


def test_a_held_out_set_is_checked_like_the_training_set(home: Path, config: Make, tmp_path: Path) -> None:
    (line,) = lines(config(eval={"dataset": {"path": str(tmp_path / "none.jsonl")}}))
    assert line == f"eval.dataset: there is no file {tmp_path / 'none.jsonl'}"


def test_models_that_are_not_there(home: Path, config: Make, tmp_path: Path) -> None:
    assert lines(config(model=str(tmp_path / "no"))) == [f"model: there is no folder {tmp_path / 'no'}"]
    (tmp_path / "empty").mkdir()
    (line,) = lines(config(model=str(tmp_path / "empty")))
    assert "has no config.json" in line


def test_a_hub_model_out_of_reach_is_said_so(home: Path, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (line,) = lines(config(model="nobody/no-such-model"))
    assert line.startswith("model: nobody/no-such-model is neither a folder here nor a model on the Hub")


def test_a_server_that_does_not_answer(home: Path, config: Make, unused_port: int) -> None:
    (line,) = lines(config(servers={"student": {"url": f"http://127.0.0.1:{unused_port}"}}))
    assert line.startswith(f"servers.student.url: no vLLM server answers at http://127.0.0.1:{unused_port}")


def test_a_server_s_interpreter_that_does_not_exist(home: Path, config: Make) -> None:
    assert lines(config(servers={"student": {"python": "/no/python"}})) == [
        "servers.student.python: there is no program /no/python"
    ]
    preflight(config(servers={"student": {"python": sys.executable}}))


def test_an_sft_run_needs_completions_and_a_scorer(home: Path, config: Make, tmp_path: Path) -> None:
    dataset: dict[str, Any] = {"path": str(tmp_path / "rows.jsonl")}
    grpo = config()
    sft = SFTRunConfig.model_validate({"model": grpo.model, "dataset": dataset, "eval": {"dataset": dataset}})
    first, second = lines(sft)
    assert "has no column `completion`" in first
    assert second.startswith("eval.reward_func: is required for a supervised run")


def test_books_and_conversations_are_looked_for(home: Path, config: Make, tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "books" / "a.txt").write_text("calm")

    def sft(dataset: dict[str, Any], **fields: Any) -> SFTRunConfig:
        return SFTRunConfig.model_validate({"model": config().model, "dataset": dataset, **fields})

    held_out = {"books": {"path": str(tmp_path / "books")}}
    preflight(sft({"path": str(tmp_path / "books")}, books={}, long_eval=held_out))
    first, second = lines(
        sft({"path": str(tmp_path / "empty")}, books={}, long_eval={"books": {"path": str(tmp_path / "none.jsonl")}})
    )
    assert first.startswith("dataset: ") and "has no .txt files" in first
    assert second.startswith("long_eval.books: there is no file")
    (line,) = lines(sft({"path": str(tmp_path / "rows.jsonl")}, books={"text_column": "body"}, long_eval=held_out))
    assert "there is no `body`; it has: prompt, answer" in line
    (line,) = lines(sft({"path": str(tmp_path / "rows.jsonl"), "messages_column": "talk"}))
    assert "no column `talk`" in line


def test_a_storage_folder_that_cannot_be_made(home: Path, config: Make, tmp_path: Path) -> None:
    (line,) = lines(config(storage={"uri": str(tmp_path / "rows.jsonl" / "below-a-file")}))
    assert line.startswith("storage.uri: ") and "cannot be made" in line
