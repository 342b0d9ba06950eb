"""Weight sync from a trainer to a running vLLM server, by every way this machine can, with requests in flight.

    python -m benchmarks.weight_sync [--transport NAME …] [--shape NAME] [--syncs N] [--vllm] [--server URL] [--json]

    random model ─▶ server of ours (and with --vllm one with vLLM's own engine) ─▶ requests in flight
                 └▶ trainer's policy ─ change some weights ─ push ─ check greedy tokens and a probe ─▶ one line per way

A way is `shared_storage`, `ipc`, `nccl`, `sparse` or `lora` (an adapter, to a server of its own: adapter_sync.py); on a CPU
`nccl` runs over gloo. `--vllm` adds vLLM's packed trainer classes in the same run. A sync changes one weight in fifty, as a
step in bfloat16 does; the first two syncs of a way, which connect and record, are left out of the figures. `whole_s` is what
the trainer waits, `closed_s` what the server does not compute for. `gb_per_s` divides the model's bytes in the server's type
by `closed_s`, so it includes the load.
Servers listen on loopback with a random key and end with this process. `--server` measures one that runs (key: VLLM_API_KEY).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import adapter_sync
from benchmarks.shapes import SHAPES
from benchmarks.sync_server import ONE_PROCESS, Load, Server, make_model, server_spec, stock_spec
from trainers import attention
from trainers.batch import PackedBatch
from trainers.config import GRPOConfig
from trainers.config_peft import ADAPTER_RANKS
from trainers.distributed import Ranks
from trainers.errors import ServerError
from trainers.model import Policy, build_policy, probe_logprobs, probe_row
from trainers.server import ServerClient
from trainers.weight_sync.broadcast import Broadcast
from trainers.weight_sync.changes import Changes
from trainers.weight_sync.ipc import Ipc
from trainers.weight_sync.probe import PROBE_TOLERANCE, probe_tokens
from trainers.weight_sync.shared_storage import SharedStorage
from trainers.weight_sync.stock import Stock
from trainers.weight_sync.sync import ServerSync
from trainers.weight_sync.ways import Way

OURS = ("loopwright", "lora")  # servers by what they take: whole models, adapters
WARM_UP = 2
CHANGED = 0.02
TIMEOUT_S = 120.0
# A greedy token of the server may differ from the trainer's where two are nearly as likely: nats it may lie below the best.
GREEDY_SLACK = {"float32": 0.01, "bfloat16": 0.5}


@torch.no_grad()
def change(policy: Policy, seed: int) -> None:
    """Redraw one weight in fifty of every matrix."""
    generator = torch.Generator(device=next(policy.parameters()).device).manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.dim() > 1:
            moved = torch.rand(parameter.shape, generator=generator, device=parameter.device) < CHANGED
            drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
            parameter.copy_(torch.where(moved, drawn * parameter.std(), parameter))


def way_of(name: str, device: torch.device, output_dir: str) -> Way:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if name == "ipc":
        return Ipc(device, 1)
    if name == "nccl":
        return Broadcast(device, backend, TIMEOUT_S)
    if name == "sparse":
        return Changes(output_dir)
    if name.startswith("vllm-"):
        return Stock(name.removeprefix("vllm-"), device, 1)
    return SharedStorage(output_dir)


def checked(policy: Policy, client: ServerClient, tokens: np.ndarray, version: int, dtype: str) -> dict[str, float]:
    """Probe and greedy tokens against the trainer's model; raises `ServerError` where they are another model's."""
    device = next(policy.parameters()).device
    difference = np.abs(client.prompt_logprobs(tokens, version) - probe_logprobs(policy, tokens, device))
    if not difference.mean() <= PROBE_TOLERANCE[dtype]:
        raise ServerError(f"version {version}: the probe is off by {difference.mean():.3f} nats on average")
    prompt = tokens[:8].tolist()
    sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": str(version)}
    greedy = client._call("POST", "/inference/v1/generate", body)["choices"][0]["token_ids"]
    best = _greedy_gap(policy, np.array(prompt + greedy, np.int32), len(prompt))
    if best > GREEDY_SLACK[dtype]:
        raise ServerError(f"version {version}: a greedy token lies {best:.2f} nats below the trainer's best")
    return {"probe_mean": float(difference.mean()), "probe_max": float(difference.max()), "greedy_gap": best}


def measure(name: str, policy: Policy, server: Server, tokens: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    device = next(policy.parameters()).device
    client = ServerClient(server.url, TIMEOUT_S, server.key)
    config = GRPOConfig(
        model=str(server.model), dataset={"path": "none.jsonl"}, output_dir=args.work_dir, weight_check_steps=0, bf16=False
    )  # type: ignore[arg-type]
    ranks = Ranks(0, 1, 0, device, None, None)
    sync = ServerSync(config, ranks, None, [client], way_of(name, device, args.work_dir))
    rows: list[dict[str, float]] = []
    moved: list[float] = []
    dtype = client.facts().dtype
    before = probe_logprobs(policy, tokens, device)
    base = args.version
    with Load(server.url, server.key, args.inflight, args.vocabulary) as load:
        for number in range(WARM_UP + args.syncs):
            change(policy, base + number)
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            metrics = sync.push(policy, base + number)
            whole = time.perf_counter() - began
            check = checked(policy, client, tokens, base + number, dtype)
            after = probe_logprobs(policy, tokens, device)
            moved.append(float(np.abs(after - before).mean()))
            before = after
            if number >= WARM_UP:
                pause, load_s = metrics["perf/weight_sync_pause_s"], metrics["perf/weight_sync_load_s"]
                rows.append({"whole_s": whole, "pause_s": pause, "load_s": load_s, "closed_s": pause + load_s, **check})
                rows[-1]["bytes"] = metrics["perf/weight_sync_bytes"]
        requests = load.finish()
    args.version += WARM_UP + args.syncs
    states = client.facts().workers
    sync.close()
    model_bytes = sum(p.numel() for p in policy.model.parameters()) * getattr(torch, dtype).itemsize
    figures = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {
        "transport": name,
        **{key: round(value, 6) for key, value in figures.items()},
        "model_bytes": model_bytes,
        "gb_per_s": round(model_bytes / figures["closed_s"] / 1e9, 3),
        "gb_per_s_load": round(model_bytes / figures["load_s"] / 1e9, 3),
        "probe_moved_nats": round(min(moved), 4),
        "fused_copy": states[0]["plan"] if states else None,
        "why_no_plan": states[0]["why_no_plan"] if states else None,
        "syncs": len(rows),
        **requests,
    }


def _greedy_gap(policy: Policy, tokens: np.ndarray, start: int) -> float:
    """How far, in nats, the least likely of tokens[start:] lies below the trainer's most likely one in its place."""
    batch = PackedBatch.from_row(probe_row(tokens), next(policy.parameters()).device)
    training = policy.training
    policy.eval()
    with torch.no_grad():
        base: Any = policy.model.base_model
        hidden = base(
            input_ids=batch.input_ids, position_ids=batch.position_ids, packed_layout=batch.layout, use_cache=False
        ).last_hidden_state[0]
        head: Any = policy.model.get_output_embeddings()
        scores = (hidden[start - 1 : -1] @ head.weight.t()).float().log_softmax(-1)
    policy.train(training)
    chosen = scores.gather(-1, torch.from_numpy(tokens[start:].astype(np.int64)).to(scores.device)[:, None])[:, 0]
    return float((scores.max(-1).values - chosen).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--transport", action="append", choices=["shared_storage", "ipc", "nccl", "sparse", "lora"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b" if cuda else "tiny")
    parser.add_argument("--rank", type=int, default=32, choices=ADAPTER_RANKS, help="of the adapter that `lora` sends")
    parser.add_argument("--syncs", type=int, default=10, help="measured syncs per way")
    parser.add_argument("--inflight", type=int, default=64 if cuda else 8, help="requests in flight")
    parser.add_argument("--vllm", action="store_true", help="also vLLM's own engine (ipc on one GPU, nccl on two)")
    parser.add_argument("--server", help="URL of a running server that holds a model of this shape, instead of starting one")
    parser.add_argument("--front", choices=["auto", "python", "rust"], default="auto", help="the server's front end")
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument for the servers' command line")
    parser.add_argument("--device", type=int, default=0, help="trainer's GPU; the server uses --server-device")
    parser.add_argument("--server-device", type=int, default=0)
    parser.add_argument("--work-dir", help="for model, logs and weights (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.version, args.vocabulary = 1, SHAPES[args.shape][-1]
    apart = args.device != args.server_device
    ways = args.transport or ["shared_storage", "sparse", *((["nccl"] if apart else ["ipc"]) if cuda else ["nccl"])]
    with tempfile.TemporaryDirectory(prefix="loopwright-sync-bench-") as folder:
        args.work_dir = args.work_dir or folder
        return run(args, ways, torch.device("cuda", args.device) if cuda else torch.device("cpu"), apart)


def kinds_of(args: argparse.Namespace, ways: list[str], apart: bool) -> list[str]:
    """The servers that these ways need: ours for whole models, ours for adapters, vLLM's own engine."""
    ours = ["loopwright"] if set(ways) - {"lora"} else []
    stock = [] if args.server or not args.vllm else ["nccl" if apart else "ipc"]
    return ours + ["lora"] * ("lora" in ways) + stock


def start(kind: str, model_dir: Path, args: argparse.Namespace) -> Server:
    if args.server:
        return Server(args.server, os.environ.get("VLLM_API_KEY", ""), model_dir)
    work_dir = Path(args.work_dir)
    if kind in OURS:
        adapters = adapter_sync.servable_with(args.rank) if kind == "lora" else {}
        spec = server_spec(model_dir, kind, args.server_arg, concurrent=args.inflight, front_end=args.front, **adapters)
    else:
        spec = stock_spec(model_dir, kind, work_dir, [*ONE_PROCESS, *args.server_arg])
    return Server.start(spec, work_dir, args.server_device)[0]


def run(args: argparse.Namespace, ways: list[str], device: torch.device, apart: bool) -> int:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model_dir = Path(args.work_dir) / "model"
    model = make_model(SHAPES[args.shape], dtype, device, model_dir)
    servers: dict[str, Server] = {}
    try:
        for kind in kinds_of(args, ways, apart):
            servers[kind] = start(kind, model_dir, args)
        for server in servers.values():
            server.wait()
        attention.install(device, dtype, log=False)
        model.set_attn_implementation(attention.NAME)
        config = GRPOConfig(model="random", dataset={"path": "none.jsonl"}, bf16=False)  # type: ignore[arg-type]
        policy = build_policy(model, config, Ranks(0, 1, 0, device, None, None))
        tokens = probe_tokens(None, args.vocabulary)
        jobs = [(name, "lora" if name == "lora" else "loopwright") for name in ways]
        jobs += [(f"vllm-{kind}", kind) for kind in servers if kind not in OURS]
        failed = 0
        for name, kind in jobs:
            common = {"benchmark": "weight_sync", "shape": args.shape, "device": str(device), "torch": torch.__version__}
            try:
                if kind == "lora":
                    line = common | adapter_sync.measure(servers[kind], tokens, device, args, TIMEOUT_S)
                else:
                    line = common | measure(name, policy, servers[kind], tokens, args)
            except Exception as error:  # the other ways are measured all the same
                failed += 1
                told = f"{type(error).__name__}: {error}"[:2000]
                line = common | {"transport": name, "error": told, "server_log": servers[kind].tail()}
            print(json.dumps(line) if args.json else _readable(line), flush=True)
        return 1 if failed else 0
    finally:
        for server in servers.values():
            server.stop()


def _readable(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"{line['transport']}: {line['error']}\n{line['server_log']}"
    if line["transport"] == "lora":
        return adapter_sync.readable(line)
    return (
        f"{line['transport']:<15} whole {line['whole_s'] * 1e3:8.1f} ms   pause {line['pause_s'] * 1e3:6.1f}   load "
        f"{line['load_s'] * 1e3:8.1f}   {line['bytes'] / 1e6:10.3f} MB sent   {line['gb_per_s']:8.2f} GB/s   "
        f"{line['requests_ok']} requests, {line['requests_failed']} failed"
    )


if __name__ == "__main__":
    sys.exit(main())
