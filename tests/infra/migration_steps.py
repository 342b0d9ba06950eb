"""Run as a program: opens the registry at argv[1] and stops for ever before its `argv[2]`-th schema statement, to be killed.

With 0 it opens it and is done. Prints how many schema statements this process ran.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from sqlalchemy import Engine, event

from infra.registry import Registry


def count_schema_statements(stop_before: int = 0) -> list[str]:
    """Of every engine of this process from now on; stops for ever before the `stop_before`-th."""
    seen: list[str] = []

    @event.listens_for(Engine, "before_cursor_execute")
    def _note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        words = statement.split()
        if words[:1] == ["ALTER"] or (words[:1] == ["CREATE"] and words[1] in ("TABLE", "INDEX")):
            seen.append(statement)
            if len(seen) == stop_before:
                print("stopped", flush=True)
                threading.Event().wait()

    return seen


if __name__ == "__main__":
    statements = count_schema_statements(int(sys.argv[2]))
    Registry(sys.argv[1]).close()
    print(len(statements), flush=True)
