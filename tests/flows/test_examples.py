"""The configs under examples/ load, and what they name does what it should on rows as the data has them."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from flows.config_file import load_config
from flows.convert import PACKAGED
from trainers.data import check_columns, load_data
from trainers.rewards import load_callable, load_object
from trainers.rollouts.tools import make_tool

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"


def test_gsm8k_smollm2_loads():
    config = load_config(
        "grpo", EXAMPLES / "gsm8k_smollm2.yaml", ["dataset.path=train.jsonl", "max_steps=9"], environ={}
    ).config
    assert config.model in PACKAGED
    assert (config.dataset.path, config.dataset.prompt_column, config.max_steps) == ("train.jsonl", "question", 9)
    assert config.dataset.system_prompt.endswith("#### 10")
    # A prompt of the longest question and a whole completion fit both the server and a row.
    assert config.token_budget == config.servers.student.max_model_len


@pytest.mark.parametrize(
    ("completion", "rewards"),
    [
        (GOLD, [1.0, 1.0]),
        ("She sold 24 in May, 72 in all.\n#### 72", [1.0, 1.0]),
        ("That makes\n#### $72.00", [1.0, 1.0]),
        ("The answer is 72.", [1.0, 0.0]),
        ("#### 71", [0.0, 1.0]),
        ("#### 72 clips and then some", [1.0, 0.0]),
        ("", [0.0, 0.0]),
    ],
)
def test_gsm8k_rewards(completion, rewards):
    config = load_config("grpo", EXAMPLES / "gsm8k_smollm2.yaml", environ={}).config
    columns = {"completions": [[{"role": "assistant", "content": completion}]], "answer": [GOLD], "question": ["?"]}
    assert [load_callable(spec)(**columns)[0] for spec in config.reward_funcs] == rewards


def test_calculator_tool_loads_and_its_parts_say_what_they_should():
    config = load_config("grpo", EXAMPLES / "calculator_tool.yaml", environ={}).config
    tool, reward = (load_callable(absolute(spec)) for spec in (*config.tools, *config.reward_funcs))
    assert make_tool(tool).schema["function"]["parameters"]["required"] == ["expression"]
    assert [tool(text) for text in ("2*(3 + 4)", "-7/2", "12 - 1.5")] == [14, -3.5, 10.5]
    for text in ("__import__('os')", "2**9", "x", "'a'*3"):
        with pytest.raises(ValueError):
            tool(text)
    said = [[{"role": "assistant", "content": content}] for content in ("It is 12, not 13.\n156", "156 it is, not 157", "")]
    assert reward(said, answer=["156"] * 3) == [1.0, 0.0, 0.0]
    rows = load_object(f"{EXAMPLES}/calculator_tool.py:problems")(3)
    assert [int(row["answer"]) for row in rows] == [tool(row["prompt"][8:].split("?")[0]) for row in rows]


def test_guess_environment_loads_and_can_be_won_by_halving():
    config = load_config("grpo", EXAMPLES / "guess_environment.yaml", environ={}).config
    spec = absolute(config.environment_factory)
    factory = partial(load_object(spec.path), **spec.kwargs)
    assert config.reward_funcs == [] and factory().highest == 7
    for row in load_object(f"{EXAMPLES}/guess_environment.py:games")(7, 7):
        game, low, high, answer = factory(), 1, 7, ""
        assert "from 1 to 7" in game.reset(**row) and game.get_reward() == 0.0
        while answer != "right":
            middle = (low + high) // 2
            answer = game.guess(middle)
            low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
        assert game.get_reward() == 1.0 and game.guess(1) == "the game is over"


def absolute(spec):
    """An import path relative to the repository, from anywhere."""
    return spec.model_copy(update={"path": str(EXAMPLES.parent / spec.path)})


@pytest.mark.parametrize("name", ["calculator_tool", "guess_environment"])
def test_the_data_of_an_example_is_written_as_its_flow_reads_it(name, tmp_path):
    file = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, EXAMPLES / f"{name}.py", "--write-data", file], check=True)
    config = load_config("grpo", EXAMPLES / f"{name}.yaml", [f"dataset.path={file}"], environ={}).config
    rows = load_data(config.dataset)
    assert len(rows) == 2000
    check_columns(rows, config)
