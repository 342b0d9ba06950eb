"""One long sequence a step: seconds, peak memory, what each lever costs and saves, beside others; predicted against measured.

    python -m benchmarks.long_context [--shape NAME] [--runs TOKENS:LEVERS …] [--longest LEVERS …] [--steps N] [--json]

A run is a length and its levers, joined by commas: `262144:offload,save_attention,tile`; or a length and a peer: `16384:hf`
(Hugging Face's Trainer with checkpointing and offload), `16384:trl` (TRL's SFTTrainer: loss in chunks, the same two). Two more
levers share the row among ranks, `cp2` by ring attention and `sp2` by heads, `cp2,sp4` by both among eight: it takes that many
GPUs, or without any, processes on the CPU.
Supervised loss on every token, whole model, float32 master weights, bfloat16 compute on a GPU, AdamW. Each run has a process of
its own, so that its peak is its own, and one that does not fit is a row too. The first step warms up and is left out unless
`--steps 0` asks for that one. Rows come from memory; the optimizer is in the seconds. `rest_bytes` is the peak beyond weights,
gradients and optimizer states: what the sequence itself takes. `predicted_gib` is `loopwright plan-memory`'s peak.

`--longest` doubles a length from `--from` on, one step each, until it does not fit. With `--layers N --hold-rest`, weights,
gradients and optimizer states of the shape's other layers are held as one block: the memory is that of the whole model with
offload, in the time of N layers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from pydantic import ValidationError

from benchmarks import long_context_peers as peers
from benchmarks.shapes import SHAPES, model_shape, qwen3_config
from benchmarks.trainer_step import MemorySource, Recorder
from trainers import attention, memory_plan
from trainers.algorithms import build_algorithm
from trainers.config import SFTConfig
from trainers.distributed import init_distributed, shutdown_distributed
from trainers.errors import ConfigError
from trainers.loop import TrainLoop
from trainers.model import build_policy, compute_dtype

LEVERS = ("offload", "save_attention", "tile")
ALL = ",".join(LEVERS)
TILE_TOKENS = 8192
GIB = 2**30
RUNS = {
    True: [*(f"65536:{levers}" for levers in ("", *LEVERS, ALL)), f"262144:{ALL}", f"524288:{ALL}"],
    False: [*(f"2048:{levers}" for levers in ("", *LEVERS, ALL)), "2048:hf", "2048:trl"],
}


class Shared(NamedTuple):
    """How many ranks share the row."""

    cp_size: int = 1
    sp_size: int = 1

    @property
    def ranks(self) -> int:
        return self.cp_size * self.sp_size

    @classmethod
    def of(cls, levers: list[str]) -> tuple[Shared, list[str]]:
        """From `cp2` and `sp2` among the levers, and the others."""
        sizes = {f"{match[1]}_size": int(match[2]) for name in levers if (match := re.fullmatch(r"(cp|sp)([1-9]\d*)", name))}
        return cls(**sizes), [name for name in levers if not re.fullmatch(r"(cp|sp)[1-9]\d*", name)]


class _Loop(TrainLoop):
    """Ends without a checkpoint: gigabytes of random weights."""

    def _save(self) -> None:
        self.last_saved = (self.callbacks.state.global_step, None)


def _model(shape: tuple[int, ...], tokens: int, attn: str, device: torch.device) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(
            qwen3_config(shape, tokens), attn_implementation=attn, dtype=torch.float32
        )


def _ours(shape: tuple[int, ...], tokens: int, levers: list[str], shared: Shared, steps: int) -> dict[str, Any]:
    """Our trainer, in this process or as one of its ranks."""
    ranks = init_distributed(needs_mesh=torch.cuda.is_available(), cp_size=shared.cp_size, sp_size=shared.sp_size)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            model="random",
            dataset={"path": "memory"},  # type: ignore[arg-type]
            output_dir=folder,
            max_steps=max(1, steps + 1),
            max_length=tokens,
            learning_rate=1e-5,
            gradient_checkpointing_kwargs={"offload": True} if "offload" in levers else None,
            save_attention="save_attention" in levers,
            mlp_tile_tokens=TILE_TOKENS if "tile" in levers else None,
            packing=False,
            cp_size=shared.cp_size,
            sp_size=shared.sp_size,
        )
        dtype = compute_dtype(config, ranks.device) or torch.float32
        backend = attention.install(ranks.device, dtype, log=ranks.is_main, on_ring=shared.cp_size > 1)
        model = _model(shape, tokens, attention.NAME, ranks.device)
        policy = build_policy(model, config, ranks, tokens)
        recorder = Recorder()
        source = MemorySource(config.max_steps, shape[-1], tokens, tokens, 1, prompt_share=0.0)
        _Loop(config, build_algorithm(config), policy, ranks, source, sink=recorder).run()
    shutdown_distributed()
    if not ranks.is_main:
        return {"peak_bytes": 0.0}  # rank 0 has the figures
    kept = recorder.steps[1:] if steps else recorder.steps
    names = ("perf/step_s", "perf/fwd_bwd_s", "perf/optimizer_s", "perf/mfu_fwd_bwd", "loss")
    result: dict[str, Any] = {name: sum(v[name] for v in kept) / len(kept) for name in names if name in kept[0]}
    peak = max(values.get("perf/peak_memory_bytes", 0.0) for values in recorder.steps)
    result |= {"peak_bytes": peak, "attention": backend.reason}
    return result


def measure(shape_name: str, tokens: int, levers: list[str], steps: int, layers: int | None, hold: bool) -> dict[str, Any]:
    """One run in this process: its figures, or that it ran out of memory, or was refused."""
    shared, others = Shared.of(levers)
    if unknown := set(others) - {*LEVERS, *peers.PEERS}:
        raise SystemExit(
            f"no lever {sorted(unknown)[0]!r}: {', '.join(LEVERS)}, cp2, sp2; and no peer: {', '.join(peers.PEERS)}"
        )
    whole = SHAPES[shape_name]
    shape = (layers or whole[0], *whole[1:])
    held_bytes = 16 * (model_shape(whole).parameters - model_shape(shape).parameters) // shared.ranks if hold else 0
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    parameters = model_shape(shape).parameters
    result: dict[str, Any] = {"tokens": tokens, "levers": levers, "layers": shape[0], "parameters": parameters}
    result |= {"held_bytes": held_bytes} if hold else {}
    peer = next((name for name in levers if name in peers.PEERS), None)
    try:
        held = torch.empty(held_bytes, dtype=torch.uint8, device=device)
        if peer is not None:
            result |= peers.measure(peer, _model(shape, tokens, "sdpa", device), tokens, steps)
        else:
            result |= _ours(shape, tokens, others, shared, steps)
        del held
    except torch.cuda.OutOfMemoryError as error:
        return result | {"failed": "out of memory", "error": str(error).splitlines()[0][:200]}
    except (ConfigError, ImportError, ValidationError) as error:
        return result | {"failed": "refused", "error": str(error)[:300]}
    if not result["peak_bytes"]:
        return result  # on a CPU nothing counts
    result["rest_bytes"] = result["peak_bytes"] - 16 * parameters // shared.ranks - held_bytes
    result["measured_gib"] = result["peak_bytes"] / GIB
    if peer is None:
        tile = TILE_TOKENS if "tile" in levers else None
        asked = memory_plan.Levers("offload" in levers, "save_attention" in levers, tile, shared.cp_size, shared.sp_size)
        total = torch.cuda.get_device_properties(device).total_memory
        predicted = memory_plan.peak(model_shape(shape), asked, tokens, shared.ranks, total, held_bytes=held_bytes)
        result |= {"predicted_gib": predicted.bytes / GIB, "predicted_at": predicted.moment}
        result["ratio"] = predicted.bytes / result["peak_bytes"]
    return result


def _in_a_process(args: argparse.Namespace, run: str, steps: int) -> dict[str, Any]:
    """The result of one run; what it prints beside goes to this process's error stream."""
    ranks = Shared.of(run.partition(":")[2].split(","))[0].ranks
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *several, "-m", "benchmarks.long_context", "--one", "--shape", args.shape, "--runs", run]
    command += ["--steps", str(steps), *(["--layers", str(args.layers)] if args.layers else [])]
    command += ["--hold-rest"] if args.hold_rest else []
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if done.returncode == 0 and lines else {"run": run, "failed": f"exit {done.returncode}"}
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def longest(run: Callable[[int], dict[str, Any]], levers: str, first: int, last: int) -> Iterator[dict[str, Any]]:
    """The result of each length until one does not fit, then the summary.

    Args:
        run: gives the result of a run of so many tokens.
    """
    tokens, fitted = first, 0
    while tokens <= last:
        result = run(tokens)
        yield result
        if "failed" in result:
            break
        fitted, tokens = tokens, 2 * tokens
    yield {"longest": levers, "tokens": fitted, "did_not_fit": tokens if tokens <= last else None}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b" if gpu else "tiny")
    parser.add_argument("--layers", type=int, help="use this many of the shape's layers")
    parser.add_argument("--hold-rest", action="store_true", help="with --layers: hold the states of the other layers too")
    parser.add_argument("--runs", nargs="*", default=None, metavar="TOKENS:LEVERS", help="default: a row for each lever")
    parser.add_argument("--longest", nargs="*", default=[], metavar="LEVERS", help="search the longest that fits of each")
    parser.add_argument("--from", type=int, default=16384, dest="first", metavar="TOKENS", help="first length of that search")
    parser.add_argument("--to", type=int, default=1 << 20, dest="last", metavar="TOKENS", help="last length of that search")
    parser.add_argument("--steps", type=int, default=1, help="measured steps, after one of warm-up; 0: that one alone")
    parser.add_argument("--json", action="store_true", help="one JSON line at the end, of all runs")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        tokens, _, levers = args.runs[0].partition(":")
        chosen = [name for name in levers.split(",") if name]
        result = measure(args.shape, int(tokens), chosen, args.steps, args.layers, args.hold_rest)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(result))
        return
    runs = args.runs if args.runs is not None else [] if args.longest else RUNS[gpu]
    results = [_in_a_process(args, run, args.steps) for run in runs]
    for levers in args.longest:
        results += longest(lambda tokens, of=levers: _in_a_process(args, f"{tokens}:{of}", 0), levers, args.first, args.last)
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    summary = {"benchmark": "long_context", "shape": args.shape, "device": device, "python": platform.python_version()}
    summary |= {"torch": torch.__version__, "transformers": transformers.__version__, "runs": results}
    print(json.dumps(summary) if args.json else "\n".join(json.dumps(result) for result in results))


if __name__ == "__main__":
    main()
