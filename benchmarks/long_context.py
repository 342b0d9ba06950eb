"""One long sequence a step: seconds, peak memory, and what each lever costs and saves.

    python -m benchmarks.long_context [--shape NAME] [--runs TOKENS:LEVERS …] [--steps N] [--json]

A run is a length and its levers, joined by commas: `262144:offload,save_attention,tile`. Supervised loss on every token, whole
model, float32 master weights, bfloat16 compute on a GPU, AdamW. Each run has a process of its own, so that its peak is its own;
the first step warms up and is left out unless `--steps 0` asks for that one. Rows come from memory; the optimizer is in the
seconds. `rest_bytes` is the peak beyond weights, gradients and optimizer states: what the sequence itself takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from typing import Any

import torch
import transformers

from benchmarks.shapes import SHAPES, qwen3_config
from benchmarks.trainer_step import MemorySource, Recorder
from trainers import attention
from trainers.algorithms import build_algorithm
from trainers.config import SFTConfig
from trainers.distributed import init_distributed, shutdown_distributed
from trainers.loop import TrainLoop
from trainers.model import build_policy, compute_dtype

LEVERS = ("offload", "save_attention", "tile")
TILE_TOKENS = 8192
RUNS = {
    True: [*(f"65536:{levers}" for levers in ("", *LEVERS, ",".join(LEVERS))), f"262144:{','.join(LEVERS)}"],
    False: [f"2048:{levers}" for levers in ("", *LEVERS, ",".join(LEVERS))],
}


def measure(shape_name: str, tokens: int, levers: list[str], steps: int, layers: int | None) -> dict[str, Any]:
    """One run in this process."""
    if unknown := set(levers) - set(LEVERS):
        raise SystemExit(f"no lever {sorted(unknown)[0]!r}: {', '.join(LEVERS)}")
    ranks = init_distributed(needs_mesh=torch.cuda.is_available())
    shape = SHAPES[shape_name]
    shape = (layers or shape[0], *shape[1:])
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # the last checkpoint's place: it is thrown away
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        config = SFTConfig(
            model=shape_name,
            dataset={"path": "memory"},  # type: ignore[arg-type]
            output_dir=folder,
            max_steps=max(1, steps + 1),
            max_length=tokens,
            learning_rate=1e-5,
            gradient_checkpointing_kwargs={"offload": True} if "offload" in levers else None,
            save_attention="save_attention" in levers,
            mlp_tile_tokens=TILE_TOKENS if "tile" in levers else None,
        )
        backend = attention.install(ranks.device, compute_dtype(config, ranks.device) or torch.float32)
        torch.manual_seed(0)
        with ranks.device:
            model = transformers.AutoModelForCausalLM.from_config(
                qwen3_config(shape, tokens), attn_implementation=attention.NAME, dtype=torch.float32
            )
        policy = build_policy(model, config, ranks, tokens)
        recorder = Recorder()
        source = MemorySource(config.max_steps, shape[-1], tokens, tokens, 1, prompt_share=0.0)
        TrainLoop(config, build_algorithm(config), policy, ranks, source, sink=recorder).run()
    kept = recorder.steps[1:] if steps else recorder.steps
    peak = max(values.get("perf/peak_memory_bytes", 0.0) for values in recorder.steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = ("perf/step_s", "perf/fwd_bwd_s", "perf/fwd_s", "perf/optimizer_s", "perf/mfu_fwd_bwd")
    result: dict[str, Any] = {"tokens": tokens, "levers": levers, "layers": shape[0], "parameters": parameters}
    result |= {name: sum(v[name] for v in kept) / len(kept) for name in names if name in kept[0]}
    result |= {"peak_bytes": peak, "rest_bytes": peak - 16 * parameters if peak else 0.0, "attention": backend.reason}
    shutdown_distributed()
    return result


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b" if gpu else "tiny")
    parser.add_argument("--layers", type=int, help="use this many of the shape's layers")
    parser.add_argument("--runs", nargs="+", default=RUNS[gpu], metavar="TOKENS:LEVERS")
    parser.add_argument("--steps", type=int, default=1, help="measured steps, after one of warm-up; 0: that one alone")
    parser.add_argument("--json", action="store_true", help="one JSON line at the end, of all runs")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        tokens, _, levers = args.runs[0].partition(":")
        print(json.dumps(measure(args.shape, int(tokens), [x for x in levers.split(",") if x], args.steps, args.layers)))
        return
    results = []
    for run in args.runs:
        command = [sys.executable, "-m", "benchmarks.long_context", "--one", "--shape", args.shape, "--runs", run]
        command += ["--steps", str(args.steps), *(["--layers", str(args.layers)] if args.layers else [])]
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        result = json.loads(lines[-1]) if done.returncode == 0 else {"run": run, "failed": done.returncode}
        results.append(result)
        print(json.dumps(result), file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    summary = {"benchmark": "long_context", "shape": args.shape, "device": device, "python": platform.python_version()}
    summary |= {"torch": torch.__version__, "transformers": transformers.__version__, "runs": results}
    print(json.dumps(summary) if args.json else "\n".join(json.dumps(result) for result in results))


if __name__ == "__main__":
    main()
