"""Programs of the model's, run against tests in the sandbox.

completion ─▶ last code block ─▶ tests of the row: asserts, HumanEval's `check`, or input/output pairs ─▶ share that passes
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from trainers.errors import ConfigError
from trainers.rewards.maths import choices
from trainers.rewards.sandbox.launch import Box, in_force, judge_asserts, run_script
from trainers.rewards.text import text_of

_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = ("python", "py", "python3", "")


def last_block(text: str, function: str = "") -> str:
    """The last fenced block marked as Python (or not marked), of those that define `function` if any does, else the whole text.

    An open block ends with the text.
    """
    blocks = [code for language, code in _BLOCK.findall(text) if language.lower() in _PYTHON]
    return next((code for code in reversed(blocks) if function and _defines(code, function)), blocks[-1] if blocks else text)


@choices(("tests",), ("test", "entry_point"), ("inputs", "outputs"))
def code_reward(
    completions: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    tests: Sequence[Any] | None = None,
    test: Sequence[Any] | None = None,
    entry_point: Sequence[Any] | None = None,
    inputs: Sequence[Any] | None = None,
    outputs: Sequence[Any] | None = None,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    workers: int | None = None,
    unsafe: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    """The share of a row's tests that the completion's program passes; with `all_or_nothing`, 1 if it is all of them, else 0.

    Columns, the first of these that the dataset has:
    - `tests`: statements such as `assert add(1, 2) == 3`, a list or one string; each item is a test, items that only import are
      put before all of them;
    - `test` with `entry_point`: HumanEval's form, a `check(candidate)` and the name of the function, one test. If the prompt is
      the beginning of the program, a completion may continue it;
    - `inputs` with `outputs`: texts for standard input and what must come out, compared line by line without trailing blanks.

    None for a row without tests, or whose tests are not Python. See `trainers.rewards.sandbox` for what programs are kept from;
    they have the standard library alone.

    Args:
        timeout_s: for all of a row's asserts together, or for each of its inputs.
        workers: programs that run at once in this process; None: as many as there are CPUs.
        unsafe: run programs also where the kernel cannot confine them.

    Raises:
        ConfigError: the dataset has none of the columns, or programs cannot be confined here.
    """
    columns = {"tests": tests, "test": test, "entry_point": entry_point, "inputs": inputs, "outputs": outputs}
    rows = _rows(len(completions), columns)
    in_force(unsafe)
    box = Box(timeout_s=timeout_s, memory_mb=memory_mb, unsafe=unsafe)
    texts = [text_of(completion) for completion in completions]
    firsts = prompts if prompts is not None else [""] * len(texts)
    passed = _pool(workers or os.cpu_count() or 1).map(lambda job: _judge(box, *job), zip(texts, firsts, rows, strict=True))
    return [None if not each else float(all(each)) if all_or_nothing else sum(each) / len(each) for each in passed]


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Bounds the programs of all groups together. Its threads stay, because a program ends with the thread that started it."""
    return ThreadPoolExecutor(workers, thread_name_prefix="code")


def _rows(count: int, columns: dict[str, Sequence[Any] | None]) -> list[dict[str, Any]]:
    """The columns of the form that the dataset has, one dictionary per completion."""
    for names in code_reward.column_choices:  # type: ignore[attr-defined]
        given = {name: columns[name] for name in names}
        if all(values is not None for values in given.values()):
            return [{name: values[i] for name, values in given.items() if values is not None} for i in range(count)]
    raise ConfigError(
        "code_reward needs the dataset columns `tests` (asserts), or `test` and `entry_point` (HumanEval), or `inputs` and "
        "`outputs` (standard input and output)"
    )


def _judge(box: Box, text: str, prompt: Any, row: dict[str, Any]) -> list[bool]:
    """Test by test; empty if there are none."""
    if any(value is None for value in row.values()):
        return []
    code = last_block(text, row.get("entry_point", ""))
    if "inputs" in row:
        pairs = zip(_texts(row["inputs"]), _texts(row["outputs"]), strict=True)
        return [_lines(run_script(box, code, given)) == _lines(wanted) for given, wanted in pairs]
    if "tests" in row:
        items = _texts(row["tests"])
        imports = [item for item in items if _only_imports(item)]
        tests = ["\n".join([*imports, item]) for item in items if item not in imports]
        return judge_asserts(box, code, tests) if tests and all(map(_is_python, tests)) else []
    entry_point = row["entry_point"]
    tests = [f"{row['test']}\ncheck({entry_point})"]
    helpers = _beginning(prompt, entry_point)
    program = f"{helpers}\n\n{code}" if _defines(code, entry_point) else helpers + code
    return judge_asserts(box, program, tests, helpers, entry_point) if all(map(_is_python, tests)) else []


def _defines(code: str, function: str) -> bool:
    return re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(function)}\b", code, re.MULTILINE) is not None


def _beginning(prompt: Any, entry_point: str) -> str:
    """The prompt's code, if the prompt begins the program that is asked for: imports, helpers, the function's head."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "") if prompt else ""
    code = last_block(text)
    return code if f"def {entry_point}" in code and _is_python(code) else ""


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value]


def _lines(text: str | None) -> list[str] | None:
    return None if text is None else [line.rstrip() for line in text.rstrip().splitlines()]


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _only_imports(source: str) -> bool:
    return _is_python(source) and all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(source).body)
