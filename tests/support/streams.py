"""Streams for tests: objects without a length, picklable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Plain:
    """`count` rows, no state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.count):
            yield {"prompt": f"p{i}", "answer": str(i)}


class Counted(Plain):
    """Its state is the number of rows it has given."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.start = self.given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.given, self.start = self.start, 0
        while self.given < self.count:
            self.given += 1
            yield {"prompt": f"p{self.given - 1}", "answer": str(self.given - 1)}

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]
