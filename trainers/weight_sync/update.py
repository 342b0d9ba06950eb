"""One server's part of a weight update from a file.

    pause (keep) ─▶ start ─▶ update {path} ─▶ finish {version} ─▶ resume

Invariants:
- the server is resumed whatever happened after the pause;
- a failed cycle is tried once more, then the sync fails.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from trainers.errors import ServerError, WeightSyncError
from trainers.server import ServerClient

logger = logging.getLogger(__name__)


def update_with_retry(client: ServerClient, path: Path, version: int) -> tuple[float, float]:
    """Seconds of the pause call, and of start to finish.

    Raises:
        WeightSyncError: it failed twice; the server was resumed on whatever weights it holds.
    """
    for attempt in (1, 2):
        try:
            return _update(client, path, version)
        except ServerError as error:
            if attempt == 2:
                raise WeightSyncError(f"{client.url} did not take policy version {version}, twice: {error}") from error
            logger.warning("weight sync to version %d failed, trying once more: %s", version, error)
    raise AssertionError("unreachable: the loop returns or raises")


def _update(client: ServerClient, path: Path, version: int) -> tuple[float, float]:
    began = time.perf_counter()
    try:
        client.pause()
        paused = time.perf_counter() - began
        client.start_update()
        client.update(str(path))
        client.finish_update(version)
        loaded = time.perf_counter() - began - paused
    finally:
        _resume(client)
    return paused, loaded


def _resume(client: ServerClient) -> None:
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


def verify(
    client: ServerClient, version: int, tokens: np.ndarray, expected: np.ndarray | None, tolerance: float
) -> float | None:
    """That it serves `version`, and `expected`: the trainer's logprobs of `tokens` from the second on; None: not compared.

    Returns the largest absolute difference in nats.

    Raises:
        WeightSyncError: it does not, or cannot be asked.
    """
    try:
        served = client.weight_version()
        if served != str(version):
            raise WeightSyncError(f"{client.url} says it serves version {served!r} after a sync to {version}")
        if expected is None:
            return None
        difference = np.abs(client.prompt_logprobs(tokens, version) - expected)
    except WeightSyncError:
        raise
    except ServerError as error:
        raise WeightSyncError(f"version {version} could not be checked: {error}") from error
    if not difference.mean() <= tolerance:
        raise WeightSyncError(
            f"after the sync to version {version} the log-probabilities of {client.url} differ from the trainer's by "
            f"{difference.mean():.4g} nats on average (largest {difference.max():.4g}, tolerance {tolerance:g}): it serves "
            "other weights, another dtype or another model than the trainer holds"
        )
    return float(difference.max())
