"""Speed of teacher scoring beside TRL's asynchronous distillation worker, against one stub that answers at once.

    python -m benchmarks.teacher_scoring [--seconds S] [--repeats N] [--json]

    stub student and teacher (own process) ◀── engine's worker process ──▶ consumer process      one at a time, on two cores

Both are given the same prompts, completions, top-k and bytes (`prompt_logprobs` over `/v1/completions`), and keep as many
rollouts in flight; ours keeps its ledger, plans and packs. Tokens are those of completions, with what the teacher said of them,
counted where a trainer would take them. Runs alternate, and medians are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import rollout_script
from benchmarks.rollout_sides import CONCURRENCY, QUEUE, STEP, Plan, Taken, samples_taken, steps_taken, worker_arguments
from benchmarks.side_by_side import Runs, arguments, command, conditions, stub

_MODULE = "benchmarks.teacher_scoring"
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


def _ours(plan: Plan) -> Iterator[Taken]:
    from trainers.config import DistillationConfig

    config = DistillationConfig.model_validate(
        {
            "model": str(plan.folder),
            "dataset": {"path": str(plan.folder / "dataset.jsonl")},
            "max_completion_length": plan.length,
            "max_concurrent_rollouts": CONCURRENCY,
            "queue_maxsize": QUEUE,
            "vllm_server_base_url": plan.url,
            "teacher_server_urls": {"default": f"{plan.url}/teacher"},
            "teacher_top_k": _TOP_K,
            **STEP,
        }
    )
    yield from steps_taken(config, plan.folder, plan.samples)


def _trl(plan: Plan) -> Iterator[Taken]:
    from trl.experimental.async_distillation.async_rollout_worker import AsyncRolloutWorker

    worker = AsyncRolloutWorker(
        **worker_arguments(plan.folder),
        max_inflight_tasks=CONCURRENCY,
        queue_maxsize=QUEUE,
        vllm_server_url=plan.url,
        teacher_server_urls={"default": f"{plan.url}/teacher"},
        teacher_top_k=_TOP_K,
        max_tokens=plan.length,
    )
    yield from samples_taken(worker)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write(folder, args.rows, args.completion_tokens)
    with stub(folder, "benchmarks.stub_teacher") as (url, pid):
        plan = Plan(folder, url, pid, args.completion_tokens, args.warmup, args.rows, args.seconds)
        runs = Runs(_MODULE, plan, args.repeats, args.rows)
    rates = {
        side: statistics.median(result["samples_per_s"] * result["trained_tokens_per_sample"] for result in results)
        for side, results in runs.of.items()
    }
    return {
        "benchmark": "teacher_scoring",
        "tokens_per_s": round(rates["ours"]),
        "peer_tokens_per_s": round(rates["trl"]),
        "ratio": round(rates["ours"] / rates["trl"], 3),
        **runs.costs(),
        "scored_tokens_per_sample": round(runs.median("ours", "trained_tokens_per_sample"), 1),
        "top_k": _TOP_K,
        **conditions(args, _VERSIONS),
    }


def main() -> None:
    parser = arguments(__doc__, warmup=600)
    parser.add_argument("--rows", type=int, default=40_000, help="of the dataset: a run must not come to its end")
    parser.add_argument("--completion-tokens", type=int, default=512)
    command(parser.parse_args(), {"ours": _ours, "trl": _trl}, compare)


if __name__ == "__main__":
    main()
