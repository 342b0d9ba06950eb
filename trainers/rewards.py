"""Reward functions that come with Loopwright, and how a reward named in a config becomes a callable.

A reward function is sync or async and is called once per group with keyword arguments: the dataset's columns, `prompts`,
`completions` (each a list of messages) and `completion_ids`, every one a list with an entry per rollout. It returns a list with
a number per rollout, or None where it does not apply.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainers.config import CallableSpec
from trainers.errors import ConfigError
from trainers.references import resolve

RewardFunc = Callable[..., Any]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_PLAIN_NUMBER = re.compile(rf"\$?\s*({_NUMBER.pattern})\s*[%.]?")
# Parsing evaluates: a tower of powers or a huge exponent would not come back.
_EXPLOSIVE = re.compile(r"(\^|\*\*)\s*\{?\s*\(?[-+]?(\d{4,}|\w+\s*(\^|\*\*))|!\s*!|\d{4,}\s*!")
_TAIL_CHARS = 2000


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of its assistant messages."""
    if isinstance(completion, str):
        return completion
    return "".join(
        str(message.get("content") or "") for message in completion if message.get("role", "assistant") == "assistant"
    )


def _final_answer(text: str) -> str:
    """What follows GSM8K's `####`, else the whole text."""
    return text.rsplit("####", 1)[1].strip() if "####" in text else text


def _plain_number(text: str) -> float | None:
    match = _PLAIN_NUMBER.fullmatch(text.strip())
    return float(match.group(1).replace(",", "")) if match else None


def _equal(prediction: str, gold: str) -> bool | None:
    """Whether the prediction states the gold answer; None: the gold answer cannot be parsed."""
    gold_answer, answer = _final_answer(gold).strip(), _final_answer(prediction[-_TAIL_CHARS:])
    if (number := _plain_number(gold_answer)) is not None:
        said = _plain_number(answer.strip())
        if said is not None:
            return said == number
    if _EXPLOSIVE.search(answer):
        return False
    from math_verify import parse, verify

    # Its timeouts use SIGALRM, which only works in the main thread; rewards run in a pool.
    target = parse(gold_answer if "$" in gold_answer or "\\boxed" in gold_answer else f"${gold_answer}$", parsing_timeout=0)
    if not target:
        return None
    return bool(verify(target, parse(answer, parsing_timeout=0), timeout_seconds=None))


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str] | None = None, answer: Sequence[str] | None = None, **kwargs: Any
) -> list[float | None]:
    """1 where the completion's final answer is mathematically equal to column `solution` (or `answer`), else 0; by math-verify.

    Understands GSM8K's `#### 42` in either. None where the reference cannot be parsed.
    """
    golds = solution if solution is not None else answer
    if golds is None:
        raise ConfigError("accuracy_reward needs a dataset column `solution` or `answer` with the reference answers")
    results = [_equal(text_of(completion), str(gold)) for completion, gold in zip(completions, golds, strict=True)]
    return [None if equal is None else float(equal) for equal in results]


def exact_match_reward(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 where the stripped completion is exactly column `answer`, else 0."""
    return [
        float(text_of(completion).strip() == str(gold).strip()) for completion, gold in zip(completions, answer, strict=True)
    ]


def format_reward(completions: Sequence[Any], pattern: str = r"####\s*[-+]?[\d.,]+", **kwargs: Any) -> list[float]:
    """1 where the regular expression `pattern` is found in the completion, else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(bool(compiled.search(text_of(completion)))) for completion in completions]


def reward_name(function: RewardFunc) -> str:
    """The name under which a reward function's metrics appear."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def load_object(path: str) -> Any:
    """The object named `package.module:name` or `file.py:name`.

    Raises:
        ConfigError: nothing importable is there; the message says what to write.
    """
    module_name, separator, name = path.rpartition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"`{path}` is no import path: write `package.module:name` or `file.py:name`")
    try:
        if module_name.endswith(".py"):
            module = _load_file(Path(module_name).resolve())
        else:
            module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot import `{path}`: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        known = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_")))
        raise ConfigError(f"`{module_name}` has no `{name}`; it has: {known}") from None


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    name = "loopwright_user_" + re.sub(r"\W", "_", str(file))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def load_callable(spec: CallableSpec) -> RewardFunc:
    """The function of a spec with its arguments bound; a class is instantiated with them.

    Raises:
        ConfigError: it does not exist or is not callable.
    """
    target = load_object(spec.path)
    kwargs = resolve(spec.kwargs)
    if isinstance(target, type):
        target = target(**kwargs)
    elif kwargs:
        target = functools.partial(target, **kwargs)
    if not callable(target):
        raise ConfigError(f"`{spec.path}` is a {type(target).__name__}, which cannot be called")
    return target
