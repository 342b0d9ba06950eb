"""Tokens per second of a vLLM server through the rollout side's own client: without log-probabilities, with the sampled
token's, with the top 8.

    python -m benchmarks.generation [--front auto|python:N|rust …] [--concurrent N] [--prompt N] [--output N] [--rounds N]
                                    [--one-by-one] [--shape NAME] [--server URL] [--json]

    random model ─▶ server as provisioning starts it ◀── ServerPool ── N requests at once

One line per front end; `auto` is what provisioning chooses here. A request has random prompt ids and a seed of
its own. Each form is warmed up, then the three take turns, `--rounds` times N requests each, and the median counts. "none" goes
over the same connections with the log-probabilities left out of the request. `--one-by-one` adds the three forms as a server
without our plugin is asked: tokens leave its engine one by one, log-probabilities are written out. `client_cpu` is the share of
one core that this side took: near 1, the server was not the limit. `--server` measures one that runs (key: VLLM_API_KEY).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from benchmarks.shapes import SHAPES
from benchmarks.sync_server import Server, make_model, server_spec
from infra.vllm_features import installed
from trainers.rollouts import protocol
from trainers.rollouts.client import GenerateClient
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import GENERATE, PLAIN, RequestFailed, SamplingForm, request_body

TOPS = 8
ONE_BY_ONE = "one by one: "
OPEN_S = 60.0
BUDGET_S = 600.0

Ask = Callable[[np.ndarray, int, int], Awaitable[int]]  # prompt ids, output tokens, seed → tokens that came


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def without_logprobs(client: GenerateClient) -> Ask:
    """Requests over the client's connections that ask for tokens alone."""

    async def ask(prompt: np.ndarray, tokens: int, seed: int) -> int:
        assert client.facts is not None
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": tokens, "seed": seed, "version": None}
        path, body = request_body(PLAIN, client.facts.generate, client.facts.model, prompt, **options)
        fields = msgspec.json.decode(body)
        (fields["sampling_params"] if path == GENERATE else fields).pop("logprobs")
        status, answer = await client.request("POST", path, msgspec.json.encode(fields))
        if status != 200:
            raise RequestFailed(f"http_{status}", answer[:300].decode(errors="replace"))
        return len(msgspec.json.decode(answer, type=_Answer).choices[0].token_ids)

    return ask


def through_the_pool(pool: ServerPool, tops: int) -> Ask:
    """Requests as rollouts make them; every token must come with its log-probabilities."""

    async def ask(prompt: np.ndarray, tokens: int, seed: int) -> int:
        lease = pool.lease()
        try:
            turn = await pool.turn(prompt, lease=lease, temperature=1.0, max_tokens=tokens, seed=seed, version=lambda: None)
        finally:
            pool.release(lease)
        count = len(turn.output_ids)
        if turn.output_logprobs.shape != (count,) or not np.isfinite(turn.output_logprobs).all():
            raise RequestFailed("logprobs", f"{count} tokens came with log-probabilities {turn.output_logprobs}")
        if tops and (turn.top_ids is None or turn.top_ids.shape != (count, tops) or (turn.top_ids < 0).any()):
            raise RequestFailed("logprobs", f"the top {tops} of {count} tokens are not all there")
        return count

    return ask


@contextmanager
def asking(name: str) -> Iterator[None]:
    """Requests of the form `name` are made meanwhile, and no others."""
    with ExitStack() as stack:
        if name.startswith(ONE_BY_ONE):
            for fields in (protocol.BATCHED, protocol.ARRAYS):
                stack.enter_context(mock.patch.dict(fields, clear=True))
        yield


async def timed(
    ask: Ask, requests: int, concurrent: int, prompt: int, output: int, vocabulary: int, seed: int
) -> tuple[int, float, float]:
    """Tokens, the seconds they took, and the share of a core that this process took."""
    draw = np.random.default_rng(seed)
    prompts = iter(draw.integers(0, vocabulary - 2, (requests, prompt), dtype=np.int32))
    seeds = iter(draw.integers(0, 2**62, requests).tolist())
    tokens = 0

    async def one() -> None:
        nonlocal tokens
        for ids in prompts:
            came = await ask(ids, output, next(seeds))  # apart: `+=` would add to the count as it was before the wait
            tokens += came

    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrent):
            group.create_task(one())
    seconds = time.perf_counter() - began
    return tokens, seconds, (time.process_time() - cpu) / seconds


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_API_KEY"] = server.key
    client = GenerateClient(server.url)
    pools = {
        tops: ServerPool([server.url], BUDGET_S, args.concurrent, form=SamplingForm(top_logprobs=tops)) for tops in (0, TOPS)
    }
    try:
        await client.open(OPEN_S)
        for pool in pools.values():
            await pool.open(OPEN_S)
        forms = {
            "none": without_logprobs(client),
            "sampled": through_the_pool(pools[0], 0),
            "top8": through_the_pool(pools[TOPS], TOPS),
        }
        if args.one_by_one:
            forms |= {ONE_BY_ONE + name: ask for name, ask in forms.items()}
        size = (args.concurrent, args.prompt, args.output, args.vocabulary)
        for name, ask in forms.items():
            with asking(name):
                await timed(ask, args.concurrent, args.concurrent, args.prompt, max(1, args.output // 8), size[-1], seed=0)
        found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in forms}
        for number in range(args.rounds):
            for at, (name, ask) in enumerate(forms.items()):
                with asking(name):
                    found[name].append(await timed(ask, args.concurrent, *size, seed=1 + len(forms) * number + at))
    finally:
        await client.close()
        for pool in pools.values():
            await pool.close()
    speed = {name: statistics.median(tokens / seconds for tokens, seconds, _ in rounds) for name, rounds in found.items()}
    fractions = {name: round(value / speed.get(ONE_BY_ONE + "none", value), 3) for name, value in speed.items()}
    assert client.facts is not None
    return {
        "tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "frac_sampled": round(speed["sampled"] / speed["none"], 3),
        "frac_top8": round(speed["top8"] / speed["none"], 3),
        **({"frac_of_one_by_one_none": fractions} if args.one_by_one else {}),
        "client_cpu": {name: round(max(cpu for *_, cpu in rounds), 2) for name, rounds in found.items()},
        "endpoint": GENERATE if client.facts.generate else "/v1/completions",
    }


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", action="append", help="auto, python:N or rust; repeatable (default: auto)")
    parser.add_argument("--concurrent", type=int, default=256 if cuda else 32, help="requests in flight")
    parser.add_argument("--prompt", type=int, default=128 if cuda else 32, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=512 if cuda else 64, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each form")
    parser.add_argument("--one-by-one", action="store_true", help="also as a server without our plugin is asked")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b" if cuda else "tiny")
    parser.add_argument("--server", help="URL of a running server with a model of this shape, instead of starting one")
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument for the servers' command line")
    parser.add_argument("--work-dir", help="for model and logs (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.vocabulary = SHAPES[args.shape][-1]
    with tempfile.TemporaryDirectory(prefix="loopwright-generation-") as folder:
        work_dir = Path(args.work_dir or folder)
        work_dir.mkdir(parents=True, exist_ok=True)
        return run(args, work_dir, cuda)


def run(args: argparse.Namespace, work_dir: Path, cuda: bool) -> int:
    model, failed = work_dir / "model", 0
    if not args.server:
        device = torch.device("cuda" if cuda else "cpu")
        make_model(SHAPES[args.shape], torch.bfloat16 if cuda else torch.float32, device, model)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    fronts = [args.server] if args.server else args.front or ["auto"]
    servers: list[Server] = []
    try:
        for front in fronts:  # all of them, because a start takes longer than a measurement
            servers.append(start(front, model, work_dir, args))
        for front, server in zip(fronts, servers, strict=True):
            line = describe(front, args, cuda)
            try:
                server.wait()
                line |= asyncio.run(measure(server, args))
            except (Exception, SystemExit) as error:
                failed += 1
                line |= {"error": _cause(error), "server_log": server.tail(15)}
            finally:
                server.stop()
            print(json.dumps(line) if args.json else _readable(line), flush=True)
    finally:
        for server in servers:
            server.stop()
    return 1 if failed else 0


def start(front: str, model: Path, work_dir: Path, args: argparse.Namespace) -> Server:
    if args.server:
        return Server(args.server, os.environ.get("VLLM_API_KEY", ""), model)
    kind, _, count = front.partition(":")
    extra = [*(("--api-server-count", count) if count else ()), *args.server_arg]
    frozen = kind == "rust"  # it takes no weights
    spec = server_spec(model, front, extra, front_end=kind, frozen=frozen, top_logprobs=TOPS, concurrent=args.concurrent)
    server, chosen = Server.start(spec, work_dir, 0)
    print(f"{front}: {'; '.join(chosen.reasons)}", file=sys.stderr, flush=True)
    return server


def describe(front: str, args: argparse.Namespace, cuda: bool) -> dict[str, Any]:
    return {
        "benchmark": "generation", "front": front, "shape": args.shape, "concurrent": args.concurrent,
        "prompt_tokens": args.prompt, "output_tokens": args.output, "rounds": args.rounds,
        "hardware": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__, "vllm": None if args.server else installed().version,
    }  # fmt: skip


def _cause(error: BaseException) -> str:
    """The first error of a group of tasks, which failed together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:2000]


def _readable(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"{line['front']}: {line['error']}\n{line['server_log']}"
    speed = line["tokens_per_s"]
    return (
        f"{line['front']:<10} none {speed['none']:9.0f} tok/s   sampled {speed['sampled']:9.0f} ({line['frac_sampled']:.0%})   "
        f"top 8 {speed['top8']:9.0f} ({line['frac_top8']:.0%})"
    )


if __name__ == "__main__":
    sys.exit(main())
