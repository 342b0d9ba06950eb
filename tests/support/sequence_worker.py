"""Ranks of the tests of sequence parallelism: `python sequence_worker.py FOLDER 2 4` forks two, then four, and fills FOLDER."""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from tests.support.fake_source import FakeSource, make_samples, spread
from tests.support.policies import grpo_config
from tests.support.tiny_model import build_model, build_tiny_model
from trainers import attention
from trainers.algorithms.grpo import GRPO
from trainers.attention.ring import GroupRing
from trainers.batch import PackedBatch
from trainers.callbacks import PrintSink
from trainers.checkpoint import latest_whole
from trainers.config import GRPOConfig, SFTConfig
from trainers.distributed import Ranks, full, init_distributed, share_rows, shutdown_distributed
from trainers.errors import ConfigError
from trainers.loop import TrainLoop
from trainers.losses import loss_inputs, normalise
from trainers.model import Policy, build_policy, gathered_parameters, probe_logprobs
from trainers.packing import pack_step
from trainers.session import build_loop
from trainers.types import Sample

LEVERS = {"gradient_checkpointing_kwargs": {"offload": True}, "save_attention": True, "mlp_tile_tokens": 16}
PLAIN: dict[str, Any] = {"gradient_checkpointing": False}
# Of a whole sequence's ratio: a loss that no rank could compute from its own terms.
SEQUENCES = {"score_centering": False, "importance_sampling": "sequence_truncate"}
PROBE = np.arange(6, 25)


@dataclass(frozen=True)
class Case:
    """`ranks` of which `cp` × `sp` share a row; five samples and empty rows, a sample a row under cp."""

    ranks: int
    cp: int = 1
    sp: int = 1
    hidden: int = 128  # 32 to a head; half as many key and value heads
    fields: dict[str, Any] = field(default_factory=lambda: PLAIN)
    longest: int = 60

    @property
    def config(self) -> GRPOConfig:
        alone = {"token_budget": 0, "per_device_train_batch_size": 1} if self.cp > 1 else {}
        return grpo_config(cp_size=self.cp, sp_size=self.sp, bf16=False, **alone, **self.fields)

    @property
    def cells(self) -> int:
        """Rows of a step, over all ranks and micro-batches."""
        return 6 if self.cp > 1 else 2


CASES = {
    "cp": Case(2, cp=2),
    "cp with checkpointing": Case(2, cp=2, fields={}),
    "cp with all levers": Case(2, cp=2, fields=LEVERS),
    "sp": Case(2, sp=2, fields=PLAIN | SEQUENCES),
    "sp with all levers": Case(2, sp=2, fields=LEVERS),
    "cp, an adapter": Case(2, cp=2, fields={"peft": {"r": 4}, "save_attention": True}),
    "sp, one KV head for two ranks": Case(2, sp=2, hidden=64),
    "sp, three KV heads for two ranks": Case(2, sp=2, hidden=192),
    "cp × sp": Case(4, cp=2, sp=2, fields=PLAIN | SEQUENCES),
    "cp × sp with all levers": Case(4, cp=2, sp=2, fields=LEVERS, longest=120),
    "dp × cp": Case(4, cp=2),
    "dp × sp": Case(4, sp=2),
    "cp of four": Case(4, cp=4, fields={"save_attention": True}),
    "sp of four, two KV heads": Case(4, sp=4),
}


COUNT: Counter[str] = Counter()


def count_passes() -> None:
    """From now on, tell in `COUNT` how often this rank sent anything round."""
    pass_on = GroupRing.pass_on

    def counted(self: GroupRing, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        COUNT["passes"] += 1
        return pass_on(self, tensor)

    GroupRing.pass_on = counted  # type: ignore[method-assign]


def samples_of(case: Case) -> list[Sample]:
    """Ragged, one of them shorter than its row's multiple; two with candidate sets."""
    samples = make_samples(seed=3, step=1, count=5, longest=case.longest)
    samples[2] = make_samples(seed=4, step=1, count=1, longest=4)[0]
    for sample in samples[::3]:
        sample.candidate_counts = np.full(sample.trained_tokens, 20, np.int32)
        sample.candidate_ids = np.tile(np.arange(0, 60, 3, dtype=np.int32), sample.trained_tokens)
    return samples


def policy_of(case: Case, ranks: Ranks, seed: int = 3) -> Policy:
    attention.install(ranks.device, torch.float64, log=False, on_ring=case.cp > 1)
    model = build_model(seed=seed, hidden=case.hidden).double()
    model.set_attn_implementation(attention.NAME)
    return build_policy(model, case.config, ranks)


def step_of(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Loss and gradients of one step, and the log-probabilities of a probe."""
    policy, config, samples = policy_of(case, ranks), case.config, samples_of(case)
    if ranks.mesh is not None:
        assert all(isinstance(p, DTensor) for p in policy.parameters()), "parameters are not sharded"
    step = pack_step(1, spread(len(samples), case.cells // ranks.dp_size, ranks.dp_size), samples, {})
    passes = COUNT["passes"]
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for row in (microbatch[ranks.dp_rank] for microbatch in step.rows):
        batch = PackedBatch.from_row(row, ranks.device, torch.float64, ranks.sequence)
        assert batch.input_ids.shape[1] <= -(-len(row.input_ids) // ranks.place_size) + 2, "this rank holds more than its part"
        outputs = policy(batch)
        loss = outputs[0].sum()
        if batch.terms:
            loss = normalise(GRPO(config).loss(loss_inputs(outputs, batch)), step.totals, ranks.dp_size)
        loss.backward()
        total += loss.detach() * ranks.leads
    if ranks.world_size > 1:
        dist.all_reduce(total)
    gradients = {name: full(p.grad).cpu() for name, p in policy.model.named_parameters() if p.grad is not None}
    probe = probe_logprobs(policy, PROBE, ranks.device)
    return {"loss": total.item(), "gradients": gradients, "probe": probe, "passes": COUNT["passes"] - passes}


def train(folder: Path, ranks: Ranks, case: Case, steps: int) -> dict[str, Any]:
    """Go on from the newest checkpoint in `folder`, if any, up to step `steps`."""
    fields = {"optim": "sgd", "learning_rate": 0.1, "output_dir": str(folder), "max_steps": steps, "save_steps": 2}
    case = Case(case.ranks, case.cp, case.sp, fields=case.fields | fields)
    source = FakeSource(steps=steps, micro=case.cells // ranks.dp_size) if ranks.is_main else None
    loop = TrainLoop(case.config, GRPO(case.config), policy_of(case, ranks), ranks, source, sink=PrintSink())
    result = loop.run(latest_whole(folder))
    assert (result.step, result.stopped) == (steps, "max_steps"), result
    history = [{name: entry[name] for name in ("step", "loss", "entropy")} for entry in loop.callbacks.state.log_history]
    return {"weights": dict(gathered_parameters(loop.policy.model, None, keep=True)), "history": history}


def digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """Share of a completion's characters that are digits."""
    return [sum(map(str.isdigit, completion[0]["content"])) / 6 for completion in completions]


def recorded(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """A whole run as a flow starts it: packed rows that every rank fetches from a rollout process, evaluations."""
    data = folder / "rows.jsonl"
    if ranks.is_main:
        folder.mkdir()
        build_tiny_model(folder / "model")
        data.write_text(
            "\n".join(json.dumps({"prompt": f"{i}+{i}=", "completion": str(2 * i) * (1 + i % 3)}) for i in range(14))
        )
    ranks.barrier()
    config = SFTConfig(
        model=str(folder / "model"),
        dataset={"path": str(data)},  # type: ignore[arg-type]
        eval={
            "dataset": {"path": str(data), "max_rows": 2},
            "reward_func": f"{__file__}:digits",
            "every": 2,
            "max_completion_length": 6,
        },  # type: ignore[arg-type]
        output_dir=str(folder / "run"),
        optim="sgd",
        learning_rate=0.1,
        gradient_accumulation_steps=2,
        max_length=32,
        sp_size=ranks.place_size,
        bf16=False,
    )
    loop = build_loop(config, ranks, sink=PrintSink())
    result = loop.run()
    history = [{name: entry.get(name) for name in ("step", "loss")} for entry in loop.callbacks.state.log_history]
    weights = dict(gathered_parameters(loop.policy.model, None, keep=True))
    return {"weights": weights, "history": history, "ended": (result.step, result.stopped), "accuracy": loop._evaluated}


def refusal(ranks: Ranks) -> str:
    """What a row of two sequences is told under cp."""
    case = Case(2, cp=2)
    policy = policy_of(case, ranks)
    row = pack_step(1, spread(2, 1, 1), samples_of(case)[:2], {}).rows[0][0]
    try:
        policy(PackedBatch.from_row(row, ranks.device, sequence=ranks.sequence))
    except ConfigError as error:
        return str(error)
    return "nothing"


def work(rank: int, world: int, port: int, folder: Path) -> None:
    """Every case of this many ranks."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    count_passes()
    ranks: Ranks | None = None
    for cp, sp in sorted({(case.cp, case.sp) for case in CASES.values() if case.ranks == world}):
        if ranks is None:
            ranks = init_distributed(120, cp_size=cp, sp_size=sp)
        else:
            ranks = replace(ranks, sequence=share_rows(ranks.device, world, cp, sp))
        for name, case in CASES.items():
            if (case.ranks, case.cp, case.sp) == (world, cp, sp):
                torch.save(step_of(case, ranks), folder / f"{name}-{rank}.pt")
        if world == 2:
            steps = 4 if cp > 1 else 2  # ring attention goes on where Ulysses stopped
            result = train(folder / "run", ranks, Case(2, cp, sp), steps)
            if ranks.is_main:
                torch.save(result, folder / f"run-{steps}.pt")
            if sp > 1:
                torch.save(recorded(folder / "recorded", ranks), folder / f"recorded-{rank}.pt")
            else:
                (folder / f"refusal-{rank}.json").write_text(json.dumps(refusal(ranks)))
    shutdown_distributed()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


if __name__ == "__main__":
    for count in map(int, sys.argv[2:]):
        mp.start_processes(work, (count, free_port(), Path(sys.argv[1])), nprocs=count, start_method="fork")  # type: ignore[attr-defined]
