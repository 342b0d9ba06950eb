"""Ring attention (arXiv:2310.01889): one causal sequence over P ranks; keys and values go round, queries stay.

    forward    rank r: own queries × own keys (causal) ─▶ out, lse
                 └─ meanwhile the keys of rank r−1 arrive; own queries × these ─▶ merged by log-sum-exp; and so on, P blocks
    backward   keys go round again; the gradient of every rank's keys follows them, each rank adds to it, until it is home

Rank r holds the chunks r and 2·P−1−r of 2·P, the early one first. So a block is one of three, of the same cost on every rank:
own keys: causal as they lie; keys of an earlier rank: all queries see their early chunk, none their late one; keys of a later
rank: the late queries see all of them, the early ones none. What is masked is not computed.

Forward and its log-sum-exp are one operator, so that `save_attention` keeps its outputs and a recomputation sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from trainers.attention.blocks import Blocks, blocks_for
from trainers.sequence_parallel import Axis


class Ring(Protocol):
    """The neighbours of a rank."""

    rank: int
    size: int

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start sending `tensor` to the next rank. The function returned gives what the previous rank sends, a tensor of the
        same shape, and waits for both. Passes are completed in the order in which they were started."""
        ...


class GroupRing:
    """Over a process group. On GPUs, nothing waits on the host: copies and kernels are ordered on the device."""

    def __init__(self, ranks: Axis) -> None:
        assert ranks.group is not None, "a ring of one rank"
        self.rank, self.size, self.group = ranks.rank, ranks.size, ranks.group
        self._next = dist.get_global_rank(ranks.group, (ranks.rank + 1) % ranks.size)
        self._previous = dist.get_global_rank(ranks.group, (ranks.rank - 1) % ranks.size)

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        came = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self.group),
            dist.P2POp(dist.irecv, came, self._previous, self.group),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return came

        return wait


class _Seen(NamedTuple):
    """The block that queries of one rank have with keys of another."""

    queries: slice
    keys: slice
    causal: bool


def _seen(rank: int, source: int, tokens: int) -> _Seen:
    early, late, both = slice(0, tokens // 2), slice(tokens // 2, tokens), slice(0, tokens)
    if source == rank:
        return _Seen(both, both, causal=True)
    return _Seen(both, early, causal=False) if source < rank else _Seen(late, both, causal=False)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, ring: Ring, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [t, Hq, D], k and v [t, Hk, D] of this rank → out [t, Hq, D] in q's type; lse [Hq, t] in float32, or float64."""
    tokens = len(q)
    kv = torch.stack((k, v))
    arriving = ring.pass_on(kv) if ring.size > 1 else None
    first, lse = blocks.forward(q, k, v, scale, True)
    lse = lse.contiguous()
    out = first.to(lse.dtype)
    for step in range(1, ring.size):
        assert arriving is not None
        kv = arriving()
        arriving = ring.pass_on(kv) if step + 1 < ring.size else None
        seen = _seen(ring.rank, (ring.rank - step) % ring.size, tokens)
        block, block_lse = blocks.forward(q[seen.queries], kv[0, seen.keys], kv[1, seen.keys], scale, seen.causal)
        _merge(out[seen.queries], lse[:, seen.queries], block, block_lse)
    return out.to(q.dtype), lse


def _merge(out: torch.Tensor, lse: torch.Tensor, block: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Attention over the keys of both, in place of `out` [t, H, D] and `lse` [H, t]."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp_().T.unsqueeze(-1))
    out.addcmul_(block.to(out.dtype), (block_lse - both).exp_().T.unsqueeze(-1))
    lse.copy_(both)


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    ring: Ring,
    blocks: Blocks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v. With the whole row's `out` and `lse`, a block's gradients are its share of them."""
    kv, d_q = torch.stack((k, v)), torch.zeros_like(q, dtype=lse.dtype)
    d_kv = torch.zeros_like(kv, dtype=lse.dtype)  # of the keys that are here
    travelling: Callable[[], torch.Tensor] | None = None
    for step in range(ring.size):
        arriving = ring.pass_on(kv) if step + 1 < ring.size else None
        seen = _seen(ring.rank, (ring.rank - step) % ring.size, len(q))
        rows = seen.queries
        block_q, block_k, block_v = blocks.backward(
            d_out[rows],
            q[rows],
            kv[0, seen.keys],
            kv[1, seen.keys],
            out[rows],
            lse[:, rows].contiguous(),
            scale,
            seen.causal,
        )
        d_q[rows] += block_q
        if travelling is not None:
            d_kv = travelling()
        d_kv[0, seen.keys] += block_k
        d_kv[1, seen.keys] += block_v
        if ring.size > 1:
            travelling = ring.pass_on(d_kv)
        if arriving is not None:
            kv = arriving()
    if travelling is not None:
        d_kv = travelling()
    return d_q.to(q.dtype), d_kv[0].to(k.dtype), d_kv[1].to(v.dtype)


_rings: dict[str, GroupRing] = {}  # by name: an operator takes no objects


def ring_of(ranks: Axis) -> str:
    """The name of a group's ring, for `ring_attention`."""
    assert ranks.group is not None, "a ring of one rank"
    name = ranks.group.group_name
    if name not in _rings or _rings[name].group is not ranks.group:
        _rings[name] = GroupRing(ranks)
    return name


@torch.library.custom_op(
    "loopwright::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float scale, str ring) -> (Tensor, Tensor)",
)
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, ring: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` on the ring of that name (`ring_of`); its first output is differentiable."""
    around = _rings[ring]
    return forward(q, k, v, scale, around, blocks_for(q, around.size))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.scale, ctx.ring = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, d_out: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    around = _rings[ctx.ring]
    return *backward(d_out, q, k, v, out, lse, ctx.scale, around, blocks_for(q, around.size)), None, None


ring_attention.register_autograd(_backward, setup_context=_keep)
