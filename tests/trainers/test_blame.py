"""What a user sees of an error in code of theirs that ran in the rollout process: their own traceback, first."""

from __future__ import annotations

import json
import linecache
import traceback
from typing import Any

import pytest

from tests.trainers.test_scoring import group_of, scored
from trainers.errors import ConfigError, RolloutFailures, came_from, full_traceback
from trainers.rollouts.blame import user_traceback, where
from trainers.rollouts.failures import FailureWindow


def parses(completions: list[Any], **columns: Any) -> list[float]:
    return [float(json.loads(completion[0]["content"])["answer"]) for completion in completions]


async def test_a_reward_that_raises_ends_the_run_with_its_own_traceback_first() -> None:
    rollouts, _ = await scored(group_of("{", "{}"), parses)
    window = FailureWindow(0.1)
    for rollout in rollouts:
        cause, _, message = str(rollout.failed).partition(": ")
        window.add(cause, message, rollout.failed_by)
    with pytest.raises(RolloutFailures, match="2 of the last 2 rollouts failed") as caught:
        window.check(final=True)
    text = full_traceback(caught.value)
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and f'File "{__file__}"' in lines[1] and "in parses" in lines[1]
    assert "KeyError: 'answer'" in text or "JSONDecodeError" in text
    users, _, ours = text.partition("the trainer heard of it here:")
    assert "scoring.py" not in users and "side_calls.py" not in users
    assert "RolloutFailures" in ours and "It came from" not in ours
    # A script, which prints the exception itself, shows it too.
    assert "in parses" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_we_raised_because_of_the_users_is_told_as_the_users() -> None:
    try:
        exec(compile("def tool():\n    raise KeyError('tool')\ntool()", "/home/user/tools.py", "exec"), {})
    except KeyError as error:
        ours = ConfigError("a tool failed")
        ours.__cause__ = error
    else:
        raise AssertionError
    linecache.clearcache()
    assert "/home/user/tools.py:2 in tool" in where(ours)
    assert user_traceback(ours).splitlines()[-1] == "KeyError: 'tool'"


def test_without_a_users_part_it_is_a_plain_traceback() -> None:
    error = ValueError("x")
    assert full_traceback(error).strip() == "ValueError: x"
    assert full_traceback(came_from(error, "Traceback: theirs")).startswith("Traceback: theirs\n")
