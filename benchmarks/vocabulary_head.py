"""The vocabulary head, forward and backward: milliseconds, memory, beside TRL's chunked head and Liger's fused cross-entropy.

    python -m benchmarks.vocabulary_head [--terms N] [--hidden H] [--vocabulary V] [--top K] [--json]

Cross-entropy of random hidden states (bfloat16 on a GPU) against random targets; every side is given the same tensors and gives
gradients of hidden states and weight. Medians of `--repeats` runs after two of warm-up, on the device's own clock. `extra_gib`
is the peak beyond the inputs, gradients included. Peers that cannot be imported are left out. `jsd_ratio`: the same head with
`--top` more ids a term and the sparse divergence on them, over the cross-entropy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from trainers.divergence import sparse_jsd
from trainers.head import token_logprobs

GIB = 2**30
TRL_CHUNK = 32768  # vocabulary columns at a time, as its trainers set it
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _ours(targets: torch.Tensor) -> Loss:
    return lambda hidden, weight: -token_logprobs(hidden, weight, targets).logprobs.mean()


def _trl(targets: torch.Tensor) -> Loss | None:
    """What TRL's trainers put in place of a model's own head, called as `add_fused_lm_head` calls it."""
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError:
        return None
    outputs = ("log_probs", "entropy", "is_top1")  # what its SFT trainer asks for

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        values = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, outputs)
        return -values[0].mean()

    return loss


def _liger(targets: torch.Tensor) -> Loss | None:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction,
        )
    except ImportError:
        return None

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)
        return out[0] if isinstance(out, tuple) else out

    return loss


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def measure(loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, repeats: int) -> dict[str, float]:
    """Median milliseconds of forward and backward, peak GiB beyond the inputs (0 without a GPU), and the loss."""
    device, seen = hidden.device, []

    def work() -> None:
        hidden.grad = weight.grad = None
        value = loss(hidden, weight)
        value.backward()
        seen.append(value.detach())

    for _ in range(2):
        work()
    hidden.grad = weight.grad = None
    extra = 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        extra = (torch.cuda.max_memory_allocated() - before) / GIB
    times = [_seconds(work, device) for _ in range(repeats)]
    return {"ms": 1000 * statistics.median(times), "extra_gib": extra, "loss": float(seen[-1])}


def run(terms: int, width: int, vocabulary: int, top: int, repeats: int) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(terms, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device, dtype=dtype) * width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (terms,), device=device)
    result: dict[str, Any] = {"benchmark": "vocabulary_head", "terms": terms, "hidden": width, "vocabulary": vocabulary}
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result |= {"python": platform.python_version(), "torch": torch.__version__, "dtype": str(dtype)}
    ours = measure(_ours(targets), hidden, weight, repeats)
    result |= ours
    for name, peer in (("trl", _trl(targets)), ("liger", _liger(targets))):
        if peer is None:
            result[f"ratio_{name}"] = None
            continue
        theirs = measure(peer, hidden, weight, repeats)
        result[f"ratio_{name}"] = theirs["ms"] / ours["ms"]
        result |= {f"{name}_{key}": value for key, value in theirs.items()}
    top_ids = torch.topk(torch.rand(terms, min(vocabulary, 4 * top), device=device), top).indices
    shares = torch.full((terms, top + 1), 0.5 / (top + 1), device=device).log()

    def divergence(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = token_logprobs(hidden, weight, targets, top_ids=top_ids)
        return sparse_jsd(torch.cat([out.logprobs[:, None], out.top_logprobs], 1), shares, 0.0, True).jsd.mean()

    jsd = measure(divergence, hidden, weight, repeats)
    result |= {"top": top, "jsd_ms": jsd["ms"], "jsd_extra_gib": jsd["extra_gib"], "jsd_ratio": jsd["ms"] / ours["ms"]}
    return result


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", type=int, default=8192 if gpu else 512)
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 64)
    parser.add_argument("--vocabulary", type=int, default=151936 if gpu else 4096)
    parser.add_argument("--top", type=int, default=64, help="ids a term beside its target, for the divergence")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = parser.parse_args()
    result = run(args.terms, args.hidden, args.vocabulary, args.top, args.repeats)
    print(json.dumps(result) if args.json else "\n".join(f"{name:16} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
