"""Speed of the rollout engine beside TRL's worker, against one stub server that answers at once.

    python -m benchmarks.rollout_engine [--samples N] [--turns N] [--json]

    stub (own process) ◀── engine's worker process ──▶ consumer process            one engine at a time, on two cores

Both are given the same prompts, answers, tool and reward, and keep the same number of rollouts in flight; ours keeps its
ledger, plans and packs. Samples are counted where a trainer would take them. Short runs alternate, and medians over them are
printed; then ours makes `--samples` samples for its memory, and every prompt must be accounted for.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import rollout_script
from benchmarks.rollout_sides import CONCURRENCY, QUEUE, STEP, Plan, Taken, samples_taken, steps_taken, worker_arguments
from benchmarks.side_by_side import Runs, arguments, command, conditions, measure, stub

_MODULE = "benchmarks.rollout_engine"
_NUM_GENERATIONS = 8
_MAX_TOKENS = 512
_VERSIONS = ("trl", "transformers", "tokenizers", "aiohttp", "uvloop", "numpy")


def _ours(plan: Plan) -> Iterator[Taken]:
    from trainers.config import GRPOConfig

    prompts = plan.samples // _NUM_GENERATIONS
    config = GRPOConfig.model_validate(
        {
            "model": str(plan.folder),
            "dataset": {"path": str(plan.folder / "dataset.jsonl"), "max_rows": prompts},
            "reward_funcs": ["benchmarks.rollout_script:alternating"],
            "tools": ["benchmarks.rollout_script:multiply"] if plan.length > 1 else [],
            "num_generations": _NUM_GENERATIONS,
            "max_completion_length": _MAX_TOKENS,
            "max_concurrent_rollouts": CONCURRENCY,
            "queue_maxsize": QUEUE,
            "vllm_server_base_url": plan.url,
            "score_centering": False,  # it would ask the server for more than TRL does
            **STEP,
        }
    )
    yield from steps_taken(config, plan.folder, prompts)


def _trl(plan: Plan) -> Iterator[Taken]:
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    worker = AsyncRolloutWorker(
        **worker_arguments(plan.folder),
        reward_funcs=[rollout_script.alternating],
        tools=[rollout_script.multiply] if plan.length > 1 else None,
        num_generations=_NUM_GENERATIONS,
        max_inflight_tasks=CONCURRENCY,
        queue_maxsize=QUEUE,
        vllm_server_url=plan.url,
        max_tokens=_MAX_TOKENS,
    )
    yield from samples_taken(worker)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = max(args.samples, 40_000) // _NUM_GENERATIONS  # a short run must not come to the end of its data
    rollout_script.write(folder, prompts, args.turns)
    with stub(folder, "benchmarks.stub_vllm") as (url, pid):
        plan = Plan(folder, url, pid, args.turns, args.warmup, prompts * _NUM_GENERATIONS, args.seconds)
        runs = Runs(_MODULE, plan, args.repeats, args.memory_every)
        long = measure(_MODULE, "ours", dataclasses.replace(plan, samples=args.samples, seconds=None), args.memory_every)
    memory = {int(at): mib for at, mib in long["rss_mib"].items()}
    samples_per_s, peer = runs.median("ours", "samples_per_s"), runs.median("trl", "samples_per_s")
    return {
        "benchmark": "rollout_engine",
        "samples_per_s": round(samples_per_s, 1),
        "peer_samples_per_s": round(peer, 1),
        "ratio": round(samples_per_s / peer, 3),
        "rss_growth_mib": round(memory[max(memory)] - memory[min(memory)], 1),
        **runs.costs(),
        "trained_tokens_per_sample": round(runs.median("ours", "trained_tokens_per_sample"), 1),
        "rss_mib": memory,
        "long_run_samples": long["all_samples"],
        "long_run_samples_per_s": round(long["samples_per_s"], 1),
        "turns": args.turns,
        "num_generations": _NUM_GENERATIONS,
        **conditions(args, _VERSIONS),
    }


def main() -> None:
    parser = arguments(__doc__, warmup=1024)
    parser.add_argument("--samples", type=int, default=50_000, help="of the long run")
    parser.add_argument("--memory-every", type=int, default=5_000, help="samples between two looks at the memory")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation; all but the last call a tool")
    args = parser.parse_args()
    if args.samples < 2 * args.memory_every:
        parser.error(f"--samples {args.samples} shows no growth: give at least twice --memory-every {args.memory_every}")
    command(args, {"ours": _ours, "trl": _trl}, compare)


if __name__ == "__main__":
    main()
