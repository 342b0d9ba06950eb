"""`code_reward`: which text is the program, which columns are the tests, and what a row is worth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainers.errors import ConfigError
from trainers.rewards import code_reward
from trainers.rewards.code import last_block

pytestmark = pytest.mark.usefixtures("confined")
HUMAN_EVAL = Path(__file__).parents[3] / "shared/data/HumanEval.jsonl.gz"  # beside the checkout, if at all
PROBLEMS = [
    {
        "prompt": 'def largest_gap(values: list[int]) -> int:\n    """Largest difference between neighbours in sorted order.\n'
        '    >>> largest_gap([1, 9, 4])\n    5\n    """\n',
        "entry_point": "largest_gap",
        "test": "def check(candidate):\n    assert candidate([1, 9, 4]) == 5\n    assert candidate([3]) == 0\n",
        "solution": "    values = sorted(values)\n    return max((b - a for a, b in zip(values, values[1:])), default=0)\n",
        "wrong": "    return max(values) - min(values)\n",
    },
    {
        "prompt": 'def shift(text: str) -> str:\n    return "".join(chr(ord(c) + 1) for c in text)\n\n\n'
        'def unshift(text: str) -> str:\n    """Undo `shift`."""\n',
        "entry_point": "unshift",
        "test": "def check(candidate):\n    for word in ('', 'abc', 'hello'):\n        assert candidate(shift(word)) == word\n",
        "solution": '    return "".join(chr(ord(c) - 1) for c in text)\n',
        "wrong": "    return text\n",
    },
]


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def human_eval(problems: list[dict[str, str]], texts: list[str]) -> list[float | None]:
    prompts = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    columns = {name: [problem[name] for problem in problems] for name in ("test", "entry_point")}
    return code_reward(completions=[chat(text) for text in texts], prompts=prompts, **columns)


def test_human_evals_form_as_continuation_and_as_a_whole_program() -> None:
    whole = [f"Sure:\n```python\n{problem['prompt']}{problem['solution']}```\n" for problem in PROBLEMS]
    assert human_eval(PROBLEMS, [problem["solution"] for problem in PROBLEMS]) == [1.0, 1.0]
    assert human_eval(PROBLEMS, whole) == [1.0, 1.0]
    example = [
        f"{text}\nFor example:\n```python\nprint({p['entry_point']})\n```" for text, p in zip(whole, PROBLEMS, strict=True)
    ]
    assert human_eval(PROBLEMS, example) == [1.0, 1.0]
    assert human_eval(PROBLEMS, [problem["wrong"] for problem in PROBLEMS]) == [0.0, 0.0]
    assert human_eval(PROBLEMS, ["no code", ""]) == [0.0, 0.0]


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="the data set is not here")
def test_human_evals_own_solutions_pass_and_wrong_ones_do_not() -> None:
    problems = [json.loads(line) for line in gzip.decompress(HUMAN_EVAL.read_bytes()).splitlines()][::8]
    assert human_eval(problems, [problem["canonical_solution"] for problem in problems]) == [1.0] * len(problems)
    assert human_eval(problems, ["    return None\n"] * len(problems)) == [0.0] * len(problems)


def test_asserts_share_or_all_or_nothing() -> None:
    tests = ["import math", "assert area(1) == math.pi", "assert area(0) == 0", "assert area(2) == 4 * math.pi"]
    right = chat("```python\nimport math\ndef area(r): return math.pi * r * r\n```")
    half = chat("```python\ndef area(r): return 3 * r * r\n```")
    columns: dict[str, Any] = {"completions": [right, half, right, right], "tests": [tests, tests, None, ["assert ("]]}
    assert code_reward(**columns) == [1.0, pytest.approx(1 / 3), None, None]
    assert code_reward(**columns, all_or_nothing=True) == [1.0, 0.0, None, None]
    assert code_reward(completions=[right], tests=["assert area(0) == 0"]) == [1.0]


def test_standard_input_and_output() -> None:
    program = chat("```\nn = int(input())\nfor i in range(n):\n    print(i, end=' \\n')\n```")
    values = code_reward(completions=[program], inputs=[["2\n", "0\n", "x\n"]], outputs=[["0\n1", "\n", "error"]])
    assert values == [pytest.approx(2 / 3)]
    slow = chat("import time\ntime.sleep(int(input()))\nprint(1)")
    assert code_reward(completions=[slow], inputs=[["0", "30"]], outputs=[["1", "1"]], timeout_s=1.0) == [0.5]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```py\nb\n\nc\n```\nend", "b\n\nc"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```\na\n```", "a"),
        ("first ```python\na = '```'\nb", "a = '```'\nb"),
        ("``` python title=x\na\n```", "a"),
    ],
)
def test_the_last_block_is_the_program(text: str, code: str) -> None:
    assert last_block(text) == code


def test_rows_without_the_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs the dataset columns `tests`"):
        code_reward(completions=["x"], test=["check"])
