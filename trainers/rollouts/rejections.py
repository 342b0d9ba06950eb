"""Prompts that could not be used at all: an epoch of nothing else would repeat for ever."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from trainers.errors import DatasetError

CAUSES = ("filtered", "too_long", "oversize")


def check_use(epochs: Iterable[Mapping[str, Any]], held: int) -> None:
    """The data has ended: something of it must have been used.

    Args:
        epochs: of each `{"trained": n, "dropped": {cause: n}}`.
        held: samples that wait to be trained.

    Raises:
        DatasetError: every group was dropped; a run that trained nothing did not succeed.
    """
    dropped: Counter[str] = Counter()
    trained = held
    for counts in epochs:
        trained += counts["trained"]
        dropped.update(counts["dropped"])
    if trained or not dropped:
        return
    causes = ", ".join(f"{count} {cause}" for cause, count in dropped.most_common())
    raise DatasetError(
        f"nothing was trained: all {dropped.total()} groups were dropped ({causes}). zero_variance: the rewards of a group are "
        "all equal, so they rank nothing: look at the rewards (rollouts.json), take easier or harder prompts, or raise "
        "num_generations or temperature; failed: see rollout/failed_total; oversize, too_long: raise the limits on length"
    )


class Rejections:
    """Counts them by epoch and cause."""

    def __init__(self) -> None:
        self._epochs: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def add(self, epoch: int, cause: str) -> None:
        if cause in CAUSES:
            self._epochs[epoch][cause] += 1

    def check(self, epoch: int, size: int | None) -> None:
        """`size`: prompts of the epoch; None while a stream has not ended. Raises `DatasetError` if none of them was of use."""
        rejected = self._epochs[epoch]
        if rejected.total() and rejected.total() == size:
            counts = ", ".join(f"{count} {cause}" for cause, count in rejected.most_common())
            raise DatasetError(
                f"every prompt of epoch {epoch} was rejected ({counts}): there is nothing to train on. filtered: by "
                "filter_prompt; too_long: prompts above the server's max_model_len − 1; oversize: sequences above "
                "max_length or token_budget"
            )
