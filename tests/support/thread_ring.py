"""A ring of ranks in threads of one process, for the maths of ring attention without process groups."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from trainers.attention import ring
from trainers.attention.blocks import Blocks
from trainers.sequence_parallel import Axis, SequenceParallel


class ThreadRing:
    """The neighbours of one rank. All ranks use one stream, so that what is put into a box is ready for who takes it out."""

    def __init__(self, rank: int, boxes: list[queue.Queue[torch.Tensor]]) -> None:
        self.rank, self.size, self._boxes = rank, len(boxes), boxes

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._boxes[(self.rank + 1) % self.size].put(tensor.clone())
        return lambda: self._boxes[self.rank].get(timeout=60)


def attention_of_threads(
    ranks: int, inputs: list[torch.Tensor], d_out: torch.Tensor, scale: float, blocks: Blocks
) -> list[torch.Tensor]:
    """Output and gradients of q, k and v of a whole sequence, each rank's part back in its place."""
    boxes: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(ranks)]
    wholes = [torch.full_like(x, float("nan")) for x in (d_out, *inputs)]

    def work(rank: int) -> None:
        positions = torch.from_numpy(SequenceParallel(cp=Axis(ranks, rank)).positions(len(d_out))).to(d_out.device)
        own, neighbours = [x[positions] for x in inputs], ThreadRing(rank, boxes)
        out, lse = ring.forward(*own, scale, neighbours, blocks)
        grads = ring.backward(d_out[positions], *own, out, lse, scale, neighbours, blocks)
        for whole, part in zip(wholes, (out, *grads), strict=True):
            whole[positions] = part

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wholes
