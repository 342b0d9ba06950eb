"""A worker of `accuracy_reward`: `{"gold": …, "answer": …}` in; `{"gold": parsed?}` and `{"equal": …}` out.

A process of its own, started by file path: parsing and comparing by sympy may take minutes or all memory, and whoever asked
kills it then. The first line is written once the imports are done, so that they do not count against the first question.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time

MEMORY_BYTES = 4 << 30


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def say(**fields: object) -> None:
        print(json.dumps(fields), file=out, flush=True)

    try:
        from math_verify import parse, verify
    except ImportError as error:
        say(error=f"accuracy_reward needs the package math-verify, which cannot be imported: {error}")
        return
    say()
    for line in sys.stdin:
        question = json.loads(line)
        gold = question["gold"]
        # Its own timeouts are off: whoever asked keeps the time.
        target = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=0)
        say(gold=bool(target))
        said = parse(question["answer"], parsing_timeout=0) if target else []
        say(equal=bool(target) and bool(verify(target, said, timeout_seconds=None)))


if __name__ == "__main__":
    main()
