"""One server's part of a weight sync.

    with our middleware:  POST /loopwright/sync  (pauses, loads, resumes by itself)
    else                  pause (keep) ─▶ start ─▶ update, once or more ─▶ finish {version} ─▶ resume

Invariant: the server is resumed whatever happened after the pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.errors import ServerError
from trainers.inference import InferenceEngine

logger = logging.getLogger(__name__)
Round = Callable[[], dict[str, Any]]  # puts in place what one update call brings, and gives its `update_info`


@dataclass(frozen=True, slots=True)
class Seconds:
    """`pause`: until no request is computed any more. `load`: from there to the last weight."""

    pause: float
    load: float


def update(client: InferenceEngine, rounds: Sequence[Round], version: int, *, one_call: bool) -> Seconds:
    """Raises `ServerError`; the server was resumed on whatever weights it holds."""
    if one_call and len(rounds) == 1:
        try:
            answer = client.sync(rounds[0](), version)
        except BaseException:
            # It resumes by itself, unless what failed was the resume, or the answer never came.
            resume(client)
            raise
        return Seconds(answer["pause_s"], answer["load_s"])
    began = time.perf_counter()
    try:
        client.pause()
        paused = time.perf_counter()
        client.start_update()
        for bring in rounds:
            client.update(bring())
        client.finish_update(version)
        loaded = time.perf_counter()
    finally:
        resume(client)
    return Seconds(paused - began, loaded - paused)


def resume(client: InferenceEngine) -> None:
    """Tries a few times: a server left paused would serve nobody."""
    for left in (2, 1, 0):
        try:
            client.resume()
            return
        except ServerError as error:
            if not left:
                raise
            logger.warning("resuming the server failed, trying again: %s", error)
            time.sleep(1.0)
