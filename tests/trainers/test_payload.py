"""Objects that reach the rollout process: what is refused and how it is said, and scripts imported a second time."""

import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainers.rewards import exact_match_reward
from trainers.rollouts.payload import Payload, read_payload, require_picklable, write_payload

ROOT = Path(__file__).parents[2]


class Length:
    def __init__(self, target):
        self.target = target

    def __call__(self, completions, **kwargs):
        return [-abs(len(completion) - self.target) for completion in completions]


def closure():
    threshold = 3

    def reward(completions, **kwargs):
        return [float(len(completion) > threshold) for completion in completions]

    return reward


def test_a_lambda_is_named_with_the_three_ways_out(tmp_path):
    with pytest.raises(TypeError, match=r"reward function `.*<lambda>`") as caught:
        write_payload(Payload(reward_funcs=[exact_match_reward, lambda completions, **kwargs: [0.0]]), tmp_path)
    for way in ("at the top level of a module", "functools.partial", "__call__"):
        assert way in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "name"),
    [(closure(), "closure.<locals>.reward"), (functools.partial(closure(), x=1), "closure.<locals>.reward"), (open, None)],
)
def test_what_cannot_be_pickled_is_named(value, name):
    if name is None:
        require_picklable("reward function", value)
        return
    with pytest.raises(TypeError) as caught:
        require_picklable("reward function", value)
    assert f"`{name}`" in str(caught.value)


def test_round_trip_in_another_process(tmp_path):
    rewards = [exact_match_reward, functools.partial(exact_match_reward, weight=2), Length(3)]
    tools = [functools.partial(json.dumps, indent=1), json.loads]
    payload = Payload(reward_funcs=rewards, dataset=[{"prompt": "a"}], tools=tools, environment_factory=Length)
    file = write_payload(payload, tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    code = f"""
        import json, pathlib
        from trainers.rollouts.payload import read_payload
        payload = read_payload(pathlib.Path({str(file)!r}))
        exact, bound, length = payload.reward_funcs
        said = exact(["4", "5"], answer=["4", "4"])
        print(json.dumps([said, bound.keywords, length(["abcd"]), payload.dataset, payload.tokenizer]))
        dumps, loads = payload.tools
        print(json.dumps([dumps.keywords, loads("[1]"), payload.environment_factory(3).target]))
    """
    first, second = map(json.loads, _python(textwrap.dedent(code)).splitlines())
    assert first == [[1.0, 0.0], {"weight": 2}, [-1], [{"prompt": "a"}], None]
    assert second == [{"indent": 1}, [1], 3]


def test_reading_here_gives_equal_objects(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_ROLLOUT_PROCESS", "0")  # restored after read_payload has set it
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    payload = read_payload(write_payload(Payload(reward_funcs=[Length(2)], dataset=[{"prompt": "b"}]), tmp_path))
    assert payload.reward_funcs[0].target == 2
    assert payload.dataset == [{"prompt": "b"}]
    assert read_payload(write_payload(Payload(), tmp_path)) == Payload()


SCRIPT = """
    import pathlib, sys
    from trainers.rollouts.payload import Payload, count_train_call, in_rollout_process, write_payload

    with open(sys.argv[1] + "/lines", "a") as lines:
        lines.write("top\\n")

    def helper(text):
        return float(len(text))

    def reward(completions, **kwargs):
        return [helper(completion) for completion in completions]

    def train():
        count_train_call()
        if not in_rollout_process():
            write_payload(Payload(reward_funcs=[reward]), pathlib.Path(sys.argv[1]))

    {calls}
    with open(sys.argv[1] + "/lines", "a") as lines:
        lines.write("after\\n")
    {after}
"""

READ = """
import pathlib, sys
from trainers.rollouts.payload import read_payload
payload = read_payload(pathlib.Path(sys.argv[1]) / "payload.pickle")
print(payload.reward_funcs[0](["ab", "c"]), payload.reward_funcs[0].__module__)
"""


def _python(code, *arguments, check=True):
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    if check:
        assert done.returncode == 0, done.stderr
        return done.stdout
    return done


def _run_script(tmp_path, calls="train()", after="", name="train.py"):
    script = tmp_path / name
    script.write_text(textwrap.dedent(SCRIPT).format(calls=calls, after=after))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["train.py", "train_without_suffix"])
def test_a_script_without_a_guard_is_imported_up_to_its_train_call(tmp_path, name):
    _run_script(tmp_path, name=name)
    assert _python(READ, str(tmp_path)) == "[2.0, 1.0] __loopwright_main__\n"
    assert (tmp_path / "lines").read_text().split() == ["top", "after", "top"]


def test_the_second_train_call_of_a_script_gets_past_the_first(tmp_path):
    _run_script(tmp_path, calls="train(); (lambda: train())()")
    assert _python(READ, str(tmp_path)).startswith("[2.0, 1.0]")
    assert (tmp_path / "lines").read_text().split() == ["top", "after", "top"]


def test_a_script_that_cannot_be_imported_twice_says_what_to_do(tmp_path):
    _run_script(tmp_path, calls="if not in_rollout_process(): train()", after="assert not in_rollout_process(), 'only once'")
    done = _python(READ, str(tmp_path), check=False)
    assert done.returncode == 1
    assert "AssertionError: only once" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_a_reward_of_an_interactive_session_is_refused(tmp_path):
    code = f"""
import pathlib
from trainers.rollouts.payload import Payload, write_payload
def reward(completions, **kwargs): return [0.0]
write_payload(Payload(reward_funcs=[reward]), pathlib.Path({str(tmp_path)!r}))
"""
    done = _python(code, check=False)
    assert done.returncode == 1
    assert "TypeError: reward function `reward`" in done.stderr
    assert "interactive session" in done.stderr
