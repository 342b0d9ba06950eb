"""The judge's process: runs the dataset's tests against functions that live in the program's process.

    python -I -S -B -c BOOT FOLDER SETTINGS      standard input: {"program", "helpers", "entry_point", "tests"} as one JSON line

Writes what it says of its own confinement, what the program's process said of its own, and one line per test, `1` or `0`. It
is confined like the program, with which it shares two pipes (descriptors in SETTINGS) and nothing else.

A name that the tests use means, in this order: Python's own; the tests' own; what `helpers` (the code of the prompt, which is
the dataset's) defines, except the entry point; a module of the standard library; the program's. So a program cannot put its
own `abs` in place of Python's, nor its own `encode` in place of the prompt's.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
from typing import Any

from .rpc import Peer, PeerGone
from .runner import start


def used_names(sources: list[str]) -> dict[str, bool]:
    """The names that `sources` use beside Python's own, and whether as a module of the standard library (`math.pi`)."""
    found: dict[str, bool] = {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            found.setdefault(node.id, False)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names:
            found[node.value.id] = True
    return found


def namespace(peer: Peer, job: dict[str, Any]) -> dict[str, Any]:
    """What the tests see."""
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    for name, is_module in used_names(job["tests"]).items():
        if is_module:
            names[name] = importlib.import_module(name)
            continue
        with contextlib.suppress(KeyError):
            names[name] = peer.ask("name", args=(name,))
    own = names.get(job["entry_point"])
    exec(compile(job["helpers"], "prompt.py", "exec"), names)
    if job["entry_point"]:
        names.pop(job["entry_point"], None)
        if own is not None:
            names[job["entry_point"]] = own
    return names


def main() -> None:
    settings = json.loads(sys.argv[2])
    calls, answers = os.fdopen(settings["calls_fd"], "wb"), os.fdopen(settings["answers_fd"], "rb")
    verdict = os.fdopen(os.dup(1), "w")
    if not start(settings):
        return
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # tests print
    first = answers.readline(1000).decode() or "refused: the program's process ended at its start"
    print(first.strip(), file=verdict, flush=True)  # said before the program runs
    job = json.loads(sys.stdin.readline())
    peer = Peer(answers, calls, {"call": lambda on, *args, **kwargs: on(*args, **kwargs)})
    try:
        peer.ask("load", args=(job["program"],))
        names = namespace(peer, job)
    except Exception:  # the program does not run: no test passes
        return
    for test in job["tests"]:
        try:
            exec(compile(test, "tests.py", "exec"), names)
            passed = True
        except PeerGone:
            return
        except BaseException:
            passed = False
        print(int(passed), file=verdict, flush=True)
