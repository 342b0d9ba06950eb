"""Metrics of the trainer ranks between two log steps: kept as device tensors, reduced across ranks by one all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trainers.algorithms import LossOutput
from trainers.distributed import Ranks
from trainers.metrics import spec_of

Pair = tuple[torch.Tensor, torch.Tensor | float]


class MetricWindow:
    """Accumulates (numerator, denominator) pairs. Names are fixed at construction: every rank sends the same vector."""

    def __init__(self, names: list[str], ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums = sorted(name for name in names if spec_of(name).reduction not in ("min", "max"))
        self.extrema = sorted(name for name in names if spec_of(name).reduction in ("min", "max"))
        self._clear()

    def _clear(self) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self._numerators: dict[str, torch.Tensor] = {name: zero.clone() for name in self.sums}
        self._denominators: dict[str, torch.Tensor] = {name: zero.clone() for name in self.sums}
        self._extrema: dict[str, torch.Tensor] = {
            name: torch.full_like(zero, float("inf") if spec_of(name).reduction == "min" else float("-inf"))
            for name in self.extrema
        }

    def add(self, metrics: dict[str, Pair]) -> None:
        """Add a row's metrics without reading any of them. An extremum's value is numerator / denominator."""
        for name, (numerator, denominator) in metrics.items():
            if name in self._extrema:
                pick = torch.minimum if spec_of(name).reduction == "min" else torch.maximum
                self._extrema[name] = pick(self._extrema[name], (numerator / denominator).detach().double())
            else:
                self._numerators[name] += numerator.detach()
                self._denominators[name] += denominator

    def reduce(self) -> dict[str, tuple[float, float]]:
        """Pairs over all ranks since the last call; empties the window. A collective, and the window's one synchronisation.

        Extrema take one slot per rank in the summed vector, so that a single SUM carries them too.
        """
        values = [*self._numerators.values(), *self._denominators.values()]
        count, slots = len(self.sums), len(self.extrema)
        vector = torch.zeros(2 * count + slots * self.ranks.world_size, dtype=torch.float64)
        if values:
            vector[: 2 * count] = torch.stack(values).cpu()
        if slots:
            first = 2 * count + slots * self.ranks.rank
            vector[first : first + slots] = torch.stack(list(self._extrema.values())).cpu()
        if self.ranks.world_size > 1:
            dist.all_reduce(vector, group=self.ranks.control)
        self._clear()
        pairs = {name: (vector[i].item(), vector[count + i].item()) for i, name in enumerate(self.sums)}
        grid = vector[2 * count :].view(self.ranks.world_size, slots)
        for i, name in enumerate(self.extrema):
            column = grid[:, i]
            value = (column.min() if spec_of(name).reduction == "min" else column.max()).item()
            if value not in (float("inf"), float("-inf")):
                pairs[name] = (value, 1.0)
        return pairs


def metric_names(output: LossOutput) -> list[str]:
    """The names an objective reports, from its output on no terms at all.

    Raises:
        KeyError: a name is not in the catalog.
    """
    for name in output.metrics:
        spec_of(name)
    return list(output.metrics)
