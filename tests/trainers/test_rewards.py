"""Reward functions and how they are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from trainers.config_parts import CallableSpec
from trainers.errors import ConfigError
from trainers.rewards import (
    accuracy_reward,
    cosine_length_reward,
    exact_match_reward,
    format_reward,
    length_reward,
    load_callable,
    maths,
    overlong_punishment,
    repetition_penalty_reward,
    reward_name,
)
from trainers.rewards.workers import Worker, WorkerPool


def said(*texts: str) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("Half of it is 21.\n#### 42", "because\n#### 42", 1.0),
        ("#### 1,024", "#### 1024", 1.0),
        ("#### 41", "#### 42", 0.0),
        ("I do not know", "#### 42", 0.0),
        ("The answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("so \\boxed{x^2+1}", "$1+x^2$", 1.0),
        ("\\boxed{2^{2024}}", "2^{2024}", 1.0),
        ("so \\boxed{1,024}.", "1024", 1.0),
        ("\\boxed{7} or \\boxed{8}", "7", 0.0),
        ("#### 9007199254740993", "#### 9007199254740992", 0.0),
        ("#### 50%", "50", 1.0),
        ("\\boxed{(1, 2)}", "(1,2)", 1.0),
        ("", "7", 0.0),
    ],
)
def test_accuracy(completion: str, gold: str, expected: float) -> None:
    assert accuracy_reward(completions=said(completion), solution=[gold]) == [expected]
    assert accuracy_reward(completions=[completion], answer=[gold]) == [expected]


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_one_is_judged(capfd: pytest.CaptureFixture[str]) -> None:
    half = [said("\\boxed{1/2}")[0], said("\\boxed{9^{9^{9^9}}}")[0], said("$\\frac{2}{4}$")[0]]
    assert accuracy_reward(completions=half[:1], answer=["0.5"]) == [1.0]  # a worker is up
    before = maths._workers().pids
    assert accuracy_reward(completions=half, answer=["0.5", "0.5", "0.5"], limit_s=2.0) == [1.0, 0.0, 1.0]
    assert len(set(maths._workers().pids) - set(before)) == 1  # one was killed, and another took its place
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("gold", ["", "because\n####"])
def test_a_reference_that_cannot_be_parsed_is_no_verdict(gold: str) -> None:
    assert accuracy_reward(completions=said("\\boxed{1/2}"), answer=[gold]) == [None]


def test_plain_numbers_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "_workers", lambda: pytest.fail("a process was asked"))
    texts = said("#### 42", "\\boxed{41}", "I do not know", "42")
    assert accuracy_reward(completions=texts, answer=["#### 42", "42", "42", "$42$"[1:-1]]) == [1.0, 0.0, 0.0, 1.0]


ECHO = """
import json, os, sys, time
print("{}", flush=True)
for line in sys.stdin:
    word = json.loads(line)["word"]
    if word == "die": os._exit(1)
    if word == "environment": word = sorted(os.environ)
    print(json.dumps({"first": word}), flush=True)
    if word == "hang": time.sleep(600)
    print(json.dumps({"second": word}), flush=True)
"""


def test_a_pool_replaces_what_died_or_hangs_and_gives_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    pool = WorkerPool([sys.executable, "-c", ECHO], size=2)
    try:
        whole = [{"first": "a"}, {"second": "a"}]
        assert pool.ask({"word": "a"}, 2, 30) == whole
        (pid,) = pool.pids
        assert pool.ask({"word": "hang"}, 2, 0.5) == [{"first": "hang"}]
        assert pool.ask({"word": "a"}, 2, 30) == whole and pid not in pool.pids
        assert pool.ask({"word": "die"}, 2, 30) == []
        assert pool.ask({"word": "a"}, 2, 30) == whole
        os.kill(pool.pids[0], signal.SIGKILL)  # while idle: the next question does not suffer
        wait_until(lambda: not pool._workers[0].alive())
        assert pool.ask({"word": "a"}, 2, 30) == whole
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda i: pool.ask({"word": i}, 2, 30), range(40)))
        assert answers == [[{"first": i}, {"second": i}] for i in range(40)] and len(pool.pids) <= 2
        seen = pool.ask({"word": "environment"}, 2, 30)[0]["first"]
        assert "SOME_API_KEY" not in seen and "PATH" in seen
    finally:
        pool.close()


def test_a_worker_whose_asker_is_gone_ends_by_itself() -> None:
    worker = Worker([sys.executable, "-P", str(Path(maths.__file__).with_name("maths_worker.py"))], 120)
    try:
        worker.send({"gold": "$1$", "answer": "\\boxed{9^{9^{9^9}}}", "limit_s": 1})
        wait_until(lambda: not worker.alive(), 60)
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("code", "message"), [("pass", "ended at its start"), ('print(\'{"error": "lacks a package"}\')', "lacks a package")]
)
def test_a_worker_that_cannot_start_says_why(code: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        WorkerPool([sys.executable, "-c", code], size=1).ask({}, 1, 1)


def test_accuracy_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="`solution` or `answer`"):
        accuracy_reward(completions=said("1"))


def test_exact_match_and_format() -> None:
    assert exact_match_reward(completions=said(" 12\n", "13"), answer=["12", 12]) == [1.0, 0.0]
    assert format_reward(completions=said("x #### 5", "5")) == [1.0, 0.0]
    assert format_reward(completions=said("<b>5</b>"), pattern="<b>.*</b>") == [1.0]


def ids(*lengths: int) -> list[list[int]]:
    return [[7] * length for length in lengths]


def test_overlong_punishment_is_dapos_formula() -> None:
    lengths = ids(0, 192, 193, 208, 224, 256, 257, 1000)
    values = overlong_punishment(completion_ids=lengths, max_length=256, buffer=64)
    assert values == [0.0, 0.0, -1 / 64, -16 / 64, -32 / 64, -1.0, -1.0, -1.0]
    for buffer in (0, 257):
        with pytest.raises(ConfigError, match=f"buffer is {buffer} with max_length 256"):
            overlong_punishment(completion_ids=ids(1), max_length=256, buffer=buffer)


def test_length_reward_is_linear_around_its_target_and_bounded() -> None:
    values = length_reward(completion_ids=ids(100, 90, 130, 5000), target_tokens=100, weight_per_token=0.01)
    assert values == pytest.approx([0.0, -0.1, -0.3, -1.0])


def test_cosine_length_reward_equals_hand_computed_values() -> None:
    right, wrong = said("#### 4")[0], said("#### 5")[0]
    values = cosine_length_reward(
        completions=[right, right, right, wrong, wrong, wrong, right, right],
        completion_ids=ids(0, 50, 25, 0, 50, 99, 100, 10),
        answer=["4"] * 7 + [""],
        max_tokens=100,
    )
    # cos(π/4) = √2/2: 1 + (1 + √2/2)/2; cos(0.99π) = −0.99951.
    expected = [2.0, 1.5, 1.853553, -10.0, -5.0, -0.002467, -10.0]
    assert values[:7] == pytest.approx(expected, abs=1e-6) and values[7] is None
    with pytest.raises(ConfigError, match="`solution` or `answer`"):
        cosine_length_reward(completions=[right], completion_ids=ids(1), max_tokens=10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("one two", 0.0),
        ("a b c d e", 0.0),
        ("a b c A b C", -1 / 4),  # abc, bca, cab, abc
        ("x x x x x x x", -4 / 5),
    ],
)
def test_repetition_penalty(text: str, expected: float) -> None:
    assert repetition_penalty_reward(completions=said(text)) == [pytest.approx(expected)]
    assert repetition_penalty_reward(completions=said(text), max_penalty=0.5) == [pytest.approx(expected / 2)]


def test_importing_the_rewards_is_cheap() -> None:
    heavy = ("torch", "sympy", "aiohttp", "math_verify", "transformers")
    check = f"import sys, trainers.rewards; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_callables_are_loaded_with_their_arguments(tmp_path: Path) -> None:
    bound = load_callable(CallableSpec(path="trainers.rewards:format_reward", kwargs={"pattern": "^a"}))
    assert bound(completions=["ab", "ba"]) == [1.0, 0.0] and reward_name(bound) == "format_reward"
    file = tmp_path / "mine.py"
    file.write_text(
        "class Judge:\n    def __init__(self, k): self.k = k\n    def __call__(self, completions): return [self.k]\n"
    )
    judge = load_callable(CallableSpec(path=f"{file}:Judge", kwargs={"k": 3}))
    assert judge(completions=["x"]) == [3] and reward_name(judge) == "Judge"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "no import path"),
        ("no.such.module:f", "cannot import"),
        ("trainers.rewards:acuracy", "has no `acuracy`; it has: .*accuracy_reward"),
        ("missing.py:f", "there is no file"),
        ("trainers.rewards:__doc__", "cannot be called"),
    ],
)
def test_wrong_paths_say_what_is_there(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callable(CallableSpec(path=path))
