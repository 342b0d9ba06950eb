"""That a server serves what the trainer holds: its version, and the log-probabilities of a few tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainers.errors import ServerError, WeightSyncError
from trainers.inference import InferenceEngine

PROBE_TEXT = "Question: what is 17 + 25? Answer: 17 + 25 = 42. The quick brown fox jumps over the lazy dog."
PROBE_TOKENS = 48
# Mean absolute difference in nats. A wrong set of weights is off by several. Rounding in bfloat16: a few hundredths, and up to
# 0.16 of a model with random weights, whose logits are large (1.7B shape, the same by every way of syncing).
PROBE_TOLERANCE = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.3, "float16": 0.3}


def probe_tokens(tokenizer: Any, vocabulary: int) -> np.ndarray:
    """int32, at most `PROBE_TOKENS`: ordinary text, or ids over all the vocabulary where the tokenizer makes nothing of it."""
    ids = [] if tokenizer is None else tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    ids = [token for token in ids if token < vocabulary][:PROBE_TOKENS]
    if len(set(ids)) < 8:
        ids = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS).tolist()
    return np.array(ids, np.int32)


def verify(
    client: InferenceEngine, version: int, tokens: np.ndarray, expected: np.ndarray | None, tolerance: float
) -> float | None:
    """That it serves `version`, and `expected`: the trainer's logprobs of `tokens` from the second on; None: not compared.

    Returns the largest absolute difference in nats.

    Raises:
        WeightSyncError: it does not.
        ServerError: it cannot be asked.
    """
    try:
        served = client.weight_version()
        difference = None if expected is None else np.abs(client.prompt_logprobs(tokens, version) - expected)
    except ServerError as error:
        raise ServerError(f"version {version} could not be checked: {error}") from error
    if served != str(version):
        raise WeightSyncError(f"{client.url} says it serves version {served!r} after a sync to {version}")
    if difference is None:
        return None
    if not difference.mean() <= tolerance:
        raise WeightSyncError(
            f"after the sync to version {version} the log-probabilities of {client.url} differ from the trainer's by "
            f"{difference.mean():.4g} nats on average (largest {difference.max():.4g}, tolerance {tolerance:g}): it serves "
            "other weights, another dtype or another model than the trainer holds"
        )
    return float(difference.max())
