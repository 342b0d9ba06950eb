"""A worker of `accuracy_reward`: `{"gold": …, "answer": …, "limit_s": …}` in; `{"gold": parsed?}` and `{"equal": …}` out.

A process of its own, started by file path: parsing and comparing by sympy may take minutes or all memory, and whoever asked
kills it then. Should that one be gone, an alarm ends the process if it is busy and the end of its input if it is idle. The
first line is written once the imports are done, so that they do not count against the first question.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30


def main() -> None:
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
        signal.alarm(2 * math.ceil(question["limit_s"]) + 1)  # its default action ends the process, whatever runs
        # Its own timeouts are off: whoever asked keeps the time.
        target = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=0)
        say(gold=bool(target))
        said = parse(question["answer"], parsing_timeout=0) if target else []
        say(equal=bool(target) and bool(verify(target, said, timeout_seconds=None)))
        signal.alarm(0)


if __name__ == "__main__":
    main()
