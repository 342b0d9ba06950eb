"""Speed of the rollout engine beside TRL's worker, against one stub server that answers at once.

    python -m benchmarks.rollout_engine [--samples N] [--turns N] [--json]

    stub (own process) ◀── engine's worker process ──▶ consumer process            one engine at a time, on two cores

Both are given the same prompts, answers, tool and reward, and keep the same number of rollouts in flight; ours keeps its
ledger, plans and packs. Samples are counted where a trainer would take them. Short runs alternate, and medians over them are
printed; then ours makes `--samples` samples for its memory, and every prompt must be accounted for. CPU seconds are those of
worker and consumer together, without the stub, start-up left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import rollout_script
from benchmarks.rollout_sides import CONCURRENCY, NUM_GENERATIONS, Plan, run

_CORES = 2
_VERSIONS = ("trl", "transformers", "tokenizers", "aiohttp", "uvloop", "numpy")


@contextlib.contextmanager
def stub(folder: Path, module: str = "benchmarks.stub_vllm") -> Iterator[tuple[str, int]]:
    """The stub server's URL and process id."""
    command = [sys.executable, "-m", module, str(folder / "answers.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise SystemExit("the stub server did not start")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def measure(side: str, plan: Plan, memory_every: int, module: str = "benchmarks.rollout_engine") -> dict[str, Any]:
    """One run of `module --side` in a process of its own; its output goes to a file that is shown if it fails."""
    fields = json.dumps({**dataclasses.asdict(plan), "folder": str(plan.folder)})
    command = [sys.executable, "-m", module, "--side", side, fields, str(memory_every)]
    log = plan.folder / f"{side}.log"
    with open(log, "w") as stream:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run of {side} failed:\n{log.read_text()[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    shown = ("samples_per_s", "cpu_ms_per_sample", "stub_cpu_ms_per_sample", "tokens_per_sample", "trained_tokens_per_sample")
    print(f"{side:5}" + "".join(f"  {name} {result[name]:.2f}" for name in shown), file=sys.stderr, flush=True)
    return result


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = max(args.samples, 40_000) // NUM_GENERATIONS  # a short run must not come to the end of its data
    rollout_script.write(folder, prompts, args.turns)
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
    with stub(folder) as (url, pid):
        plan = Plan(folder, url, pid, args.turns, args.warmup, prompts * NUM_GENERATIONS, args.seconds)
        for _ in range(args.repeats):
            for side in runs:
                runs[side].append(measure(side, plan, args.memory_every))
        long = measure("ours", dataclasses.replace(plan, samples=args.samples, seconds=None), args.memory_every)

    def median(side: str, name: str) -> float:
        return statistics.median(result[name] for result in runs[side])

    # Every n-th answer is taken in turn, so that these differ only by where a run was cut.
    for name in ("tokens_per_sample", "trained_tokens_per_sample"):
        ours, theirs = median("ours", name), median("trl", name)
        if abs(ours / theirs - 1) > 0.01:
            raise SystemExit(f"not the same work: {name} is {ours:.1f} here and {theirs:.1f} there")
    memory = {int(at): mib for at, mib in long["rss_mib"].items()}
    samples_per_s, peer = median("ours", "samples_per_s"), median("trl", "samples_per_s")
    cpu, peer_cpu = median("ours", "cpu_ms_per_sample"), median("trl", "cpu_ms_per_sample")
    return {
        "benchmark": "rollout_engine",
        "samples_per_s": round(samples_per_s, 1),
        "peer_samples_per_s": round(peer, 1),
        "ratio": round(samples_per_s / peer, 3),
        "cpu_ratio": round(cpu / peer_cpu, 3),
        "rss_growth_mib": round(memory[max(memory)] - memory[min(memory)], 1),
        "cpu_ms_per_sample": round(cpu, 3),
        "peer_cpu_ms_per_sample": round(peer_cpu, 3),
        "stub_cpu_ms_per_sample": round(median("ours", "stub_cpu_ms_per_sample"), 3),
        "tokens_per_sample": round(median("ours", "tokens_per_sample"), 1),
        "trained_tokens_per_sample": round(median("ours", "trained_tokens_per_sample"), 1),
        "rss_mib": memory,
        "long_run_samples": long["all_samples"],
        "long_run_samples_per_s": round(long["samples_per_s"], 1),
        "turns": args.turns,
        "concurrency": CONCURRENCY,
        "num_generations": NUM_GENERATIONS,
        "repeats": args.repeats,
        "seconds": args.seconds,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _VERSIONS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000, help="of the long run")
    parser.add_argument("--memory-every", type=int, default=5_000, help="samples between two looks at the memory")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation; all but the last call a tool")
    parser.add_argument("--repeats", type=int, default=3, help="short runs of each engine")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured in a short run")
    parser.add_argument("--warmup", type=int, default=1024, help="samples of a run that are not counted")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # one run, in the process that `measure` starts
    args = parser.parse_args()
    if args.side is not None:
        side, fields, memory_every = args.side
        fields = json.loads(fields)
        print(json.dumps(run(side, Plan(**{**fields, "folder": Path(fields["folder"])}), int(memory_every))), flush=True)
        return
    if args.samples < 2 * args.memory_every:
        parser.error(f"--samples {args.samples} shows no growth: give at least twice --memory-every {args.memory_every}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < _CORES:
        parser.error(f"two cores are needed, this process may use {len(cores)}")
    os.sched_setaffinity(0, cores[:_CORES])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    print(json.dumps(result) if args.json else "\n".join(f"{name:28} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
