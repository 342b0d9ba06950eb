"""Speed of teacher scoring beside TRL's asynchronous distillation worker, against one stub that answers at once.

    python -m benchmarks.teacher_scoring [--seconds S] [--repeats N] [--json]

    stub student and teacher (own process) ◀── engine's worker process ──▶ consumer process      one at a time, on two cores

Both are given the same prompts, completions, top-k and bytes (`prompt_logprobs` over `/v1/completions`), and keep as many
rollouts in flight; ours keeps its ledger, plans and packs. Tokens are those of completions, with what the teacher said of them,
counted where a trainer would take them. Runs alternate, and medians are printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import rollout_script
from benchmarks.rollout_engine import measure, stub
from benchmarks.rollout_sides import CONCURRENCY, QUEUE, Plan, Taken, measured, samples_taken, steps_taken, worker_arguments

_CORES = 2
_PROMPTS = 64  # different ones: the stub keeps the teacher's answer to each
_TOP_K = 8
_VOCABULARY = 1000  # ids in completions: those of special tokens are above
_VERSIONS = ("trl", "transformers", "aiohttp", "uvloop", "numpy", "msgspec")


def write(folder: Path, rows: int, completion_tokens: int) -> None:
    """What both engines and the stub read."""
    tokenizer = rollout_script.build_tokenizer(1)
    tokenizer.save_pretrained(folder)
    with open(folder / "dataset.jsonl", "w") as stream:
        for row in range(rows):
            content = rollout_script.question(row % _PROMPTS)
            stream.write(json.dumps({"prompt": [{"role": "user", "content": content}]}) + "\n")
    rng = random.Random(0)
    completions = []
    for number in range(_PROMPTS):
        ids = [rng.randrange(4, _VOCABULARY) for _ in range(completion_tokens - 1)] + [tokenizer.eos_token_id]
        logprobs = {"token_logprobs": [-rng.expovariate(2.0) for _ in ids], "tokens": [f"token_id:{i}" for i in ids]}
        choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": "stop", "token_ids": ids}
        body = {"id": f"cmpl-{number}", "object": "text_completion", "created": 1, "model": rollout_script.MODEL}
        completions.append(json.dumps(body | {"choices": [{**choice, "prompt_token_ids": []}]}, separators=(",", ":")))
    answers = {"completions": completions, "model": rollout_script.MODEL, "max_model_len": rollout_script.MAX_MODEL_LEN}
    (folder / "answers.json").write_text(json.dumps(answers | {"vocabulary": _VOCABULARY, "top_k": _TOP_K}))


def _ours(plan: Plan, completion_tokens: int) -> Iterator[Taken]:
    from trainers.config import DistillationConfig

    config = DistillationConfig.model_validate(
        {
            "model": str(plan.folder),
            "dataset": {"path": str(plan.folder / "dataset.jsonl")},
            "max_completion_length": completion_tokens,
            "max_concurrent_rollouts": CONCURRENCY,
            "queue_maxsize": QUEUE,
            "vllm_server_base_url": plan.url,
            "teacher_server_urls": {"default": f"{plan.url}/teacher"},
            "teacher_top_k": _TOP_K,
            "gradient_accumulation_steps": 8,
            "token_budget": 16384,
            "max_staleness": 64,
        }
    )
    yield from steps_taken(config, plan.folder, plan.samples)


def _trl(plan: Plan, completion_tokens: int) -> Iterator[Taken]:
    from trl.experimental.async_distillation.async_rollout_worker import AsyncRolloutWorker

    worker = AsyncRolloutWorker(
        **worker_arguments(plan.folder),
        max_inflight_tasks=CONCURRENCY,
        queue_maxsize=QUEUE,
        vllm_server_url=plan.url,
        teacher_server_urls={"default": f"{plan.url}/teacher"},
        teacher_top_k=_TOP_K,
        max_tokens=completion_tokens,
    )
    yield from samples_taken(worker)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write(folder, args.rows, args.completion_tokens)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    with stub(folder, "benchmarks.stub_teacher") as (url, pid):
        plan = Plan(folder, url, pid, args.completion_tokens, args.warmup, args.rows, args.seconds)
        for _ in range(args.repeats):
            for side, results in runs.items():
                results.append(measure(side, plan, args.rows, "benchmarks.teacher_scoring"))

    def median(side: str, name: str) -> float:
        return statistics.median(result[name] for result in runs[side])

    for name in ("tokens_per_sample", "trained_tokens_per_sample"):
        if abs(median("ours", name) / median("trl", name) - 1) > 0.01:
            raise SystemExit(
                f"not the same work: {name} is {median('ours', name):.1f} here and {median('trl', name):.1f} there"
            )
    rates = {
        side: statistics.median(result["samples_per_s"] * result["trained_tokens_per_sample"] for result in results)
        for side, results in runs.items()
    }
    return {
        "benchmark": "teacher_scoring",
        "tokens_per_s": round(rates["ours"]),
        "peer_tokens_per_s": round(rates["trl"]),
        "ratio": round(rates["ours"] / rates["trl"], 3),
        "cpu_ratio": round(median("ours", "cpu_ms_per_sample") / median("trl", "cpu_ms_per_sample"), 3),
        "cpu_ms_per_sample": round(median("ours", "cpu_ms_per_sample"), 3),
        "peer_cpu_ms_per_sample": round(median("trl", "cpu_ms_per_sample"), 3),
        "stub_cpu_ms_per_sample": round(median("ours", "stub_cpu_ms_per_sample"), 3),
        "tokens_per_sample": round(median("ours", "tokens_per_sample"), 1),
        "scored_tokens_per_sample": round(median("ours", "trained_tokens_per_sample"), 1),
        "top_k": _TOP_K,
        "concurrency": CONCURRENCY,
        "repeats": args.repeats,
        "seconds": args.seconds,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _VERSIONS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000, help="of the dataset: a run must not come to its end")
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each engine")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured in a run")
    parser.add_argument("--warmup", type=int, default=600, help="samples of a run that are not counted")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # one run, in the process that `measure` starts
    args = parser.parse_args()
    if args.side is not None:
        side, fields, memory_every = args.side
        given = json.loads(fields)
        plan = Plan(**{**given, "folder": Path(given["folder"])})
        source = {"ours": _ours, "trl": _trl}[side](plan, plan.turns)
        print(json.dumps(measured(source, plan, int(memory_every))), flush=True)
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < _CORES:
        parser.error(f"two cores are needed, this process may use {len(cores)}")
    os.sched_setaffinity(0, cores[:_CORES])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    print(json.dumps(result) if args.json else "\n".join(f"{name:28} {value}" for name, value in result.items()))


if __name__ == "__main__":
    sys.exit(main())
