"""What the sandbox says of programs under test: right of ordinary ones, and not to be forged by the program."""

from __future__ import annotations

import pytest

from trainers.rewards.sandbox.launch import Box, judge_asserts

pytestmark = pytest.mark.usefixtures("confined")
BOX = Box(timeout_s=5.0, memory_mb=256, disk_mb=4)
SHORT = Box(timeout_s=1.0, memory_mb=256, disk_mb=4)


ORDINARY = """
import math
class Stack:
    def __init__(self): self.items = []
    def push(self, x):
        self.items.append(x)
        return self
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
class Own(Exception): pass
def add(a, b): return a + b
def sort(values): values.sort()
def apply(f, x): return f(x)
def fail(): raise ValueError("no")
def own(): raise Own("x")
def pair(): return (1, [2, {3: {4}}], b"5", 6j, None)
def count(n):
    for i in range(n): yield i
LIMIT = 9
"""


def test_verdicts_of_ordinary_tests() -> None:
    passing = [
        "assert add(1, 2) == 3 and add('a', 'b') == 'ab' and add([1], [2]) == [1, 2]",
        "assert pair() == (1, [2, {3: {4}}], b'5', 6j, None)",
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
        "assert apply(lambda x: x * 2, 4) == 8",
        "assert len(Stack().push(1).push(2)) == 2 and Stack().push(1) == Stack().push(1) and Stack().push(1) != Stack()",
        "try:\n    fail()\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
        "try:\n    own()\nexcept Exception as error:\n    assert 'Own' in str(error)\nelse:\n    assert False",
        "assert list(count(3)) == [0, 1, 2]",
        "assert LIMIT == 9 and math.isclose(add(0.1, 0.2), 0.3) and add(float('inf'), 1) == float('inf')",
        "stack = Stack()\nstack.items = [7]\nassert stack.items == [7]",
    ]
    failing = ["assert add(1, 2) == 4", "missing()", "assert Stack() == 3", "raise SystemExit(0)", "add(1)"]
    assert judge_asserts(BOX, ORDINARY, passing + failing) == [True] * len(passing) + [False] * len(failing)


CHEATS = {
    "ends before the tests": "import os\nos._exit(0)",
    "ends in a call": "import os\ndef f(x): os._exit(0)",
    "exits in a call": "import sys\ndef f(x): sys.exit(0)",
    "equals everything": (
        "class E:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(x): return E()"
    ),
    "an int that equals everything": "class E(int):\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "its own builtins": "import builtins\nbuiltins.AssertionError = None\nabs = lambda x: 0\nsum = abs\ndef f(x): return 10**9",
    "writes a verdict everywhere": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'1\\n1\\n1\\n')\n    except OSError: pass\ndef f(x): return 1"
    ),
    "answers in place of the protocol": (
        'import os\nfor fd in range(64):\n    try: os.write(fd, b\'{"value": 0, "args": []}\\n\' * 100)\n'
        "    except OSError: pass\ndef f(x): return 1"
    ),
    "searches its memory": (
        "import gc, sys\ndef f(x):\n    frame, texts = sys._getframe(), []\n    while frame:\n"
        "        texts.append(repr(frame.f_locals))\n        frame = frame.f_back\n"
        "    texts += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, str, list))]\n"
        "    return 271828 if any('271828' in text for text in texts) else 0"
    ),
    "raises what stops a judge": "def f(x): raise KeyboardInterrupt",
    "a module of its own": "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return 0",
    "closes every descriptor": "import os\nos.closerange(0, 64)\ndef f(x): return 1",
    "is no program": "def f(x: return",
    "is empty": "",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_verdict_cannot_be_forged(cheat: str) -> None:
    tests = ["assert f(5) == 271828", "assert abs(f(5) - 271828) < 1", "import math\nassert math.isclose(f(5), 271828)"]
    assert judge_asserts(BOX, CHEATS[cheat], tests) == [False] * 3


def test_helpers_of_the_prompt_are_the_datasets() -> None:
    helpers = "def encode(x): return x + 1\ndef decode(x):\n    '''Undo encode.'''"
    tests = ["def check(candidate):\n    assert candidate(encode(4)) == 4\ncheck(decode)"]
    right, cheat = "\ndef decode(x): return x - 1", "\ndef encode(x): return x\ndef decode(x): return x"
    assert judge_asserts(BOX, helpers + right, tests, helpers, "decode") == [True]
    assert judge_asserts(BOX, helpers + cheat, tests, helpers, "decode") == [False]
    assert judge_asserts(BOX, "x = 1", tests, helpers, "decode") == [False]
