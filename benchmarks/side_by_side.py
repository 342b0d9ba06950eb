"""Two engines side by side, ours and TRL's: the command and report of `rollout_engine` and `teacher_scoring`.

    command ─▶ compare ─▶ Runs ─┬─ stub server, a process
                                └─ module --side SIDE PLAN: a process for each run (rollout_sides), one at a time

CPU seconds are those of worker and consumer together, without the stub, start-up left out.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rollout_sides import CONCURRENCY, Plan, Taken, measured

_SIDES = ("trl", "ours")
_CORES = 2


@contextmanager
def stub(folder: Path, module: str) -> Iterator[tuple[str, int]]:
    """The URL and process id of the stub server `module`."""
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


def measure(module: str, side: str, plan: Plan, memory_every: int) -> dict[str, Any]:
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


class Runs:
    """`repeats` runs of each side in turn; refused if they did not do the same work."""

    def __init__(self, module: str, plan: Plan, repeats: int, memory_every: int) -> None:
        self.of: dict[str, list[dict[str, Any]]] = {side: [] for side in _SIDES}
        for _ in range(repeats):
            for side, results in self.of.items():
                results.append(measure(module, side, plan, memory_every))
        # The answers are the same ones in turn, so that these differ only by where a run was cut.
        for name in ("tokens_per_sample", "trained_tokens_per_sample"):
            ours, theirs = self.median("ours", name), self.median("trl", name)
            if abs(ours / theirs - 1) > 0.01:
                raise SystemExit(f"not the same work: {name} is {ours:.1f} here and {theirs:.1f} there")

    def median(self, side: str, name: str) -> float:
        return statistics.median(result[name] for result in self.of[side])

    def costs(self) -> dict[str, float]:
        """CPU of both sides, and what a sample is."""
        cpu, peer_cpu = self.median("ours", "cpu_ms_per_sample"), self.median("trl", "cpu_ms_per_sample")
        return {
            "cpu_ratio": round(cpu / peer_cpu, 3),
            "cpu_ms_per_sample": round(cpu, 3),
            "peer_cpu_ms_per_sample": round(peer_cpu, 3),
            "stub_cpu_ms_per_sample": round(self.median("ours", "stub_cpu_ms_per_sample"), 3),
            "tokens_per_sample": round(self.median("ours", "tokens_per_sample"), 1),
        }


def conditions(args: argparse.Namespace, versions: Sequence[str]) -> dict[str, Any]:
    """Under which figures were seen. `versions`: distributions whose versions count."""
    return {
        "concurrency": CONCURRENCY,
        "repeats": args.repeats,
        "seconds": args.seconds,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in versions},
    }


def arguments(description: str | None, warmup: int) -> argparse.ArgumentParser:
    """Those of either benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="short runs of each engine")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured in a short run")
    parser.add_argument("--warmup", type=int, default=warmup, help="samples of a run that are not counted")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # one run, in the process that `measure` starts
    return parser


def command(
    args: argparse.Namespace,
    sources: Mapping[str, Callable[[Plan], Iterator[Taken]]],
    compare: Callable[[argparse.Namespace, Path], dict[str, Any]],
) -> None:
    """The whole comparison, on two cores, or one run of a side."""
    if args.side is not None:
        side, fields, memory_every = args.side
        given = json.loads(fields)
        plan = Plan(**{**given, "folder": Path(given["folder"])})
        print(json.dumps(measured(sources[side](plan), plan, int(memory_every))), flush=True)
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < _CORES:
        raise SystemExit(f"two cores are needed, this process may use {len(cores)}")
    os.sched_setaffinity(0, cores[:_CORES])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    print(json.dumps(result) if args.json else "\n".join(f"{name:28} {value}" for name, value in result.items()))
