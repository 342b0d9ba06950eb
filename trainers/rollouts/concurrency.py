"""How many rollouts one server should have in flight: a cap that follows its KV cache.

    start: floor(KV tokens / max_model_len) ─▶ calm: × 1.25 per cap-many finished rollouts, up to the ceiling
                                            ─▶ full: × 0.7, and no second cut before in-flight is below the cap

Calm is a cache below 0.6 with nothing waiting, full is above 0.8. Nothing in flight is cancelled by a cut; new rollouts wait.
The cap is a float, never below 1. A server that tells nothing keeps the cap at the ceiling.
"""

from __future__ import annotations

from trainers.rollouts.server_load import ServerLoad

CALM_BELOW = 0.6  # share of the KV cache
FULL_ABOVE = 0.8
GROWTH = 1.25
CUT = 0.7


class AdaptiveCap:
    """The cap of one server.

    Args:
        ceiling: most rollouts in flight, whatever the server could hold; at least 1.
        kv_tokens: tokens its KV cache holds; None: unknown, the cap starts at the ceiling.
        max_model_len: the longest sequence in tokens, of which so many certainly fit.
    """

    def __init__(self, ceiling: int, kv_tokens: int | None, max_model_len: int) -> None:
        assert ceiling >= 1, f"ceiling {ceiling}"
        self.ceiling = ceiling
        self.value = float(ceiling if kv_tokens is None else min(ceiling, max(1, kv_tokens // max_model_len)))
        self._calm = False  # as of the last look
        self._finished = 0  # rollouts since the last change, while calm
        self._cutting = False  # in-flight has not been below the cap since the last cut

    def observe(self, load: ServerLoad | None, in_flight: int) -> None:
        """One look at the server, which has `in_flight` rollouts. None: it told nothing this time."""
        self._settle(in_flight)
        self._calm = load is not None and load.kv_cache_usage < CALM_BELOW and load.waiting == 0
        if not self._calm:
            self._finished = 0
        if load is not None and load.kv_cache_usage > FULL_ABOVE and not self._cutting:
            self.value = max(1.0, self.value * CUT)
            self._cutting = True

    def finished(self, in_flight: int) -> None:
        """A rollout ended; `in_flight` are left."""
        self._settle(in_flight)
        if not self._calm or self._cutting:
            return
        self._finished += 1
        if self._finished >= self.value:
            self.value = min(float(self.ceiling), self.value * GROWTH)
            self._finished = 0

    def _settle(self, in_flight: int) -> None:
        if self._cutting and in_flight < self.value:
            self._cutting = False
