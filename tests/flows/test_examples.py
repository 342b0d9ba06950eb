"""The configs under examples/ load, and their rewards say what they should on rows as the data has them."""

from pathlib import Path

import pytest

from flows.config_file import load_config
from flows.convert import PACKAGED
from trainers.rewards import load_callable

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
