"""The program's process: confines itself, then runs the model's code.

    python -I -S -B -c BOOT FOLDER MODE SETTINGS      MODE `serve`: functions for a judge; `script`: standard input and output

Standard input holds first a line with the number of bytes of the program, then the program, then what is for it: calls, or
its input. The first line of standard output is this module's, written before any of the model's code runs: `confined: …`,
`unconfined: …` or `refused: …`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from .confine import CannotConfine, Limits, confine
from .rpc import OPEN, Peer, PeerGone


def start(settings: dict[str, Any]) -> bool:
    """Confine this process and say so. With `unsafe` it goes on under the limits alone where it cannot be confined."""
    try:
        said = "confined: " + confine(settings["folder"], Limits(**settings["limits"]))
        if os.getppid() != settings["parent"]:  # it was gone before it could be asked for: nobody waits for an answer
            return False
    except CannotConfine as error:
        said = f"{'unconfined' if settings['unsafe'] else 'refused'}: {error}"
    os.write(1, said.encode() + b"\n")
    return not said.startswith("refused")


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(fd, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_program(fd: int) -> str:
    """Read without a buffer: what follows is not ours."""
    digits = b""
    while not digits.endswith(b"\n"):
        digits += read_exactly(fd, 1) or b"\n"
    return read_exactly(fd, int(digits or 0)).decode()


def serve() -> None:
    """The names of the program for a judge, until it has no more questions."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)  # what the program prints is no answer
    names: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}

    def load(on: None, text: str) -> None:
        exec(compile(text, "program.py", "exec"), names)

    peer = Peer(calls, answers, {**OPEN, "load": load, "name": lambda on, wanted: names[wanted]})
    try:
        while True:
            peer.serve(peer.receive())
    except PeerGone:
        pass


def main() -> None:
    mode, settings = sys.argv[2], json.loads(sys.argv[3])
    del sys.argv[1:]
    if not start(settings):
        sys.exit(1)
    if mode == "serve":
        serve()
    else:
        text = read_program(0)
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
