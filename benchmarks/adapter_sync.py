"""What a run that trains an adapter (LoRA) syncs: from the push to a server that can be asked for it, by stages.

    policy ─ gather ─ write ─▶ .vllm_lora/policy-v<N> ─ load ─▶ server ─▶ first token ─▶ log-probabilities against the trainer's

`python -m benchmarks.weight_sync --transport lora` runs it. `servable_s` is from the push to the answer of the load, after
which requests may name the adapter: `gather_s` (all before the file: to the host, in the server's type), `write_s` (as peft
reads it) and `load_s` (the call alone) are parts of it. `first_s` is a request of one token under the new adapter, `again_s`
the same once more. Requests are in flight meanwhile, each under the adapter that was newest when it began; a push waits until
none names one that the push will remove.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.sync_server import Load, Server
from trainers import attention, lora
from trainers.adapters import version_of
from trainers.config import GRPOConfig
from trainers.distributed import Ranks
from trainers.errors import ServerError
from trainers.model import Policy, build_policy, probe_logprobs
from trainers.server import ServerClient
from trainers.weight_sync.lora import SAMPLED_TOKENS, Adapters, StagedAdapter
from trainers.weight_sync.probe import PROBE_TOLERANCE
from trainers.weight_sync.sync import ServerSync

WARM_UP = 2
STALENESS = 2
STAGES = ("whole_s", "servable_s", "gather_s", "write_s", "load_s", "first_s", "again_s", "probe_mean", "probe_max", "bytes")


class TimedClient(ServerClient):
    """Knows when its last adapter was loaded, and how long the call took."""

    load_s = loaded_at = 0.0

    def load_adapter(self, name: str, folder: str) -> None:
        began = time.perf_counter()
        super().load_adapter(name, folder)
        self.loaded_at = time.perf_counter()
        self.load_s = self.loaded_at - began


class TimedAdapters(Adapters):
    """Knows how long the last one took to write, and when that began."""

    write_s = write_at = 0.0

    def _write(self, staging: StagedAdapter, version: int) -> None:
        self.write_at = time.perf_counter()
        super()._write(staging, version)
        self.write_s = time.perf_counter() - self.write_at


def servable_with(rank: int) -> dict[str, int]:
    """What a server for `measure` is started with, besides the model."""
    return {"max_lora_rank": rank, "max_loras": STALENESS + 2}


def make_policy(server: Server, device: torch.device, rank: int, work_dir: str) -> tuple[GRPOConfig, Policy]:
    """The server's own model, read from its folder, with an adapter of `rank`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(server.model, dtype=dtype)
    model.to(device)
    model.set_attn_implementation(attention.NAME)
    config = GRPOConfig.model_validate(
        {
            "model": str(server.model), "dataset": {"path": "none.jsonl"}, "output_dir": work_dir, "weight_check_steps": 0,
            "weight_sync": "lora", "max_staleness": STALENESS, "bf16": False, "peft": {"r": rank, "lora_alpha": 2 * rank},
        }
    )  # fmt: skip
    return config, build_policy(model, config, Ranks(0, 1, 0, device, None, None))


@torch.no_grad()
def redraw(policy: Policy, seed: int) -> None:
    """Another adapter altogether, whose effect is a good part of its layer's."""
    for number, (name, parameter) in enumerate(sorted(lora.adapter_parameters(policy.model).items())):
        generator = torch.Generator(device=parameter.device).manual_seed(1000 * seed + number)
        std = 0.02 if "lora_B" in name else parameter.shape[-1] ** -0.5
        parameter.normal_(std=std, generator=generator)


def measure(
    server: Server, tokens: np.ndarray, device: torch.device, args: argparse.Namespace, timeout_s: float
) -> dict[str, Any]:
    """The medians of `args.syncs` pushes. Raises `ServerError` where the server's log-probabilities are not the trainer's."""
    config, policy = make_policy(server, device, args.rank, args.work_dir)
    client = TimedClient(server.url, timeout_s, server.key)
    way = TimedAdapters(args.work_dir, STALENESS)
    sync = ServerSync(config, Ranks(0, 1, 0, device, None, None), None, [client], way)
    rows: list[dict[str, float]] = []
    moved: list[float] = []
    dtype = client.facts().dtype
    before = probe_logprobs(policy, tokens, device)
    with Load(server.url, server.key, args.inflight, args.vocabulary, lambda: client.adapter) as load:
        for version in range(1, WARM_UP + args.syncs + 1):
            redraw(policy, version)
            wait_for_older(load, version - 1 - STALENESS, timeout_s)
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            sync.push(policy, version)
            row = {"whole_s": time.perf_counter() - began, "servable_s": client.loaded_at - began}
            row |= {"gather_s": way.write_at - began, "write_s": way.write_s, "load_s": client.load_s, "bytes": way.bytes_sent}
            row |= {"first_s": timed_token(client, tokens), "again_s": timed_token(client, tokens)}
            rows.append(row | checked(policy, client, tokens, args.vocabulary, version, dtype))
            after = probe_logprobs(policy, tokens, device)
            moved.append(float(np.abs(after - before).mean()))
            before = after
        requests = load.finish()
    sync.close()
    measured = rows[WARM_UP:]
    figures = {name: round(statistics.median(row[name] for row in measured), 6) for name in STAGES}
    worst = {f"{name}_max": round(max(row[name] for row in measured), 6) for name in ("servable_s", "load_s")}
    found = {"transport": "lora", "rank": args.rank, **figures, **worst, "probe_moved_nats": round(min(moved), 4)}
    return found | {"syncs": len(measured), **requests}


def readable(line: dict[str, Any]) -> str:
    stages = "   ".join(f"{name.removesuffix('_s')} {line[name] * 1e3:7.1f} ms" for name in STAGES if name.endswith("_s"))
    return f"lora   {stages}   {line['bytes'] / 1e6:.1f} MB   {line['requests_ok']} requests, {line['requests_failed']} failed"


def wait_for_older(load: Load, version: int, timeout_s: float) -> None:
    """Until no request in flight names that version's adapter or an older one. ServerError: it takes too long."""
    deadline = time.monotonic() + timeout_s
    while any(name is not None and (version_of(name) or 0) <= version for name in list(load.named.values())):
        if time.monotonic() > deadline:
            raise ServerError(f"after {timeout_s:.0f} s requests still run under the adapter of version {version}")
        time.sleep(0.005)


def timed_token(client: ServerClient, tokens: np.ndarray) -> float:
    """Seconds of a request for one token under the newest adapter."""
    began = time.perf_counter()
    client.sampled(tokens, 1, 1)
    return time.perf_counter() - began


def checked(
    policy: Policy, client: ServerClient, tokens: np.ndarray, vocabulary: int, version: int, dtype: str
) -> dict[str, float]:
    """What the server samples with the newest adapter, by the trainer's model. Raises `ServerError` where they differ."""
    ids, logprobs = client.sampled(tokens, SAMPLED_TOKENS, vocabulary)
    whole = np.concatenate([tokens, ids]).astype(np.int32)
    device = next(policy.parameters()).device
    difference = np.abs(probe_logprobs(policy, whole, device)[len(tokens) - 1 :] - logprobs)
    if not difference.mean() <= PROBE_TOLERANCE[dtype]:
        raise ServerError(
            f"version {version}: the adapter's log-probabilities are off by {difference.mean():.3f} nats on average"
        )
    return {"probe_mean": float(difference.mean()), "probe_max": float(difference.max())}
