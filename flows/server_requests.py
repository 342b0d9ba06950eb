"""Asking the flow of a run for servers, from another process of this machine (or of one that shares the run's folder).

    `loopwright servers add RUN` ── <id>.ask.json ──▶ flow (while it trains) ── <id>.answer.json ──▶ the command

Files appear by rename. A request holds until its asker has stopped waiting; then it is thrown away unread.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from infra.outbox import write_atomically
from trainers.errors import ConfigError

FOLDER = "server_requests"
POLL_S = 0.2


class ServersRefused(ConfigError):
    """The run's servers stay as they are."""


@dataclass(frozen=True)
class Request:
    """`add` or `remove` one server by its `url`, or `count` servers that the run starts itself."""

    id: str
    action: Literal["add", "remove"]
    url: str | None
    count: int
    until: float  # unix time

    def __str__(self) -> str:
        return f"{self.action} {self.url or self.count}"


def ask(folder: Path, action: Literal["add", "remove"], url: str | None, count: int, timeout_s: float) -> str:
    """What the flow of the run in `folder` did, in words.

    Raises:
        ServersRefused: it did not do it, or nobody answered.
    """
    box = folder / FOLDER
    box.mkdir(parents=True, exist_ok=True)
    request = Request(secrets.token_hex(8), action, url, count, time.time() + timeout_s)
    asked, answered = box / f"{request.id}.ask.json", box / f"{request.id}.answer.json"
    write_atomically(asked, json.dumps(asdict(request)).encode())
    try:
        while time.time() < request.until:
            if answered.exists():
                answer = json.loads(answered.read_text(encoding="utf-8"))
                if not answer["done"]:
                    raise ServersRefused(answer["text"])
                return answer["text"]
            time.sleep(POLL_S)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    raise ServersRefused(
        f"the run did not answer within {timeout_s:.0f} s: servers come and go while it trains, not while it evaluates"
    )


class Requests:
    """The flow's side."""

    def __init__(self, folder: Path) -> None:
        self._box = folder / FOLDER

    def take(self) -> list[Request]:
        """What was asked since the last call."""
        found = []
        for path in sorted(self._box.glob("*.ask.json")):
            try:
                request = Request(**json.loads(path.read_text(encoding="utf-8")))
            except (FileNotFoundError, ValueError, TypeError):
                continue  # its asker has just given up, or it is none of ours
            path.unlink(missing_ok=True)
            if request.until > time.time():
                found.append(request)
        return found

    def answer(self, request: Request, done: bool, text: str) -> None:
        if request.until > time.time():
            answer = json.dumps({"done": done, "text": text}).encode()
            write_atomically(self._box / f"{request.id}.answer.json", answer)
