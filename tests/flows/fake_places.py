"""A server's place without a server, at the seam `flows.fleet.Place`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from infra.errors import NotEnoughGPUs, ServerStartFailed


class FakePlace:
    """`script`: what its starts do, one after the other: "up", "fails", "refused" (as `user`), "waits" (for `go` or `stop`)."""

    def __init__(self, name: str, script: list[str] | None = None, free: bool = True) -> None:
        self.name, self.script, self.free = name, script or [], free
        self.starts = 0
        self.leased = self.given_up = False
        self.dead: str | None = None
        self.go = threading.Event()
        self._url: str | None = None
        self._ended = threading.Event()

    @property
    def url(self) -> str | None:
        return self._url

    @property
    def gpus(self) -> int:
        return 0

    @property
    def row(self) -> dict[str, Any]:
        return {"name": self.name, "url": self._url}

    def lease(self) -> None:
        if not self.free:
            raise NotEnoughGPUs("1 GPUs are asked for; this machine has 0")
        self.leased = True

    def start(self, say: Callable[[str], None]) -> None:
        self.starts += 1
        self._ended.clear()
        what = self.script.pop(0) if self.script else "up"
        say(f"{self.name}: starting")
        if what == "waits":
            while not self.go.wait(0.01):
                if self._ended.is_set():
                    raise ServerStartFailed("it was ended before it was ready")
        if what in ("fails", "refused"):
            raise ServerStartFailed("it ended before it was ready", "user" if what == "refused" else "infrastructure")
        self.dead, self._url = None, f"http://127.0.0.1/{self.name}/{self.starts}"

    def death(self) -> str | None:
        return self.dead if self._url is not None else None

    def die(self) -> None:
        self.dead = f"vLLM server {self.name} died: killed by SIGKILL\nend of its log:\nlast words"

    def stop(self) -> None:
        self._url = None
        self._ended.set()

    def give_up(self) -> None:
        self.stop()
        self.leased, self.given_up = False, True
