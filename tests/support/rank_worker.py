"""One rank of a distributed test: `torchrun … rank_worker.py FOLDER`. What it computes is left in FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.support.fake_control_plane import FakeControlPlane
from tests.support.fake_source import FakeSource, make_samples, spread, taught
from tests.support.policies import distillation_config, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.algorithms.distillation import Distillation
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.sft import SFT
from trainers.batch import PackedBatch
from trainers.callbacks import PrintSink
from trainers.checkpoint import latest_whole
from trainers.config import SFTConfig
from trainers.distributed import Ranks, full, init_distributed, shutdown_distributed
from trainers.errors import LoopwrightError
from trainers.loop import TrainLoop
from trainers.losses import loss_inputs, normalise
from trainers.model import Policy, gathered_parameters
from trainers.packing import pack_step
from trainers.rollouts.process import RolloutProcess
from trainers.types import Sample, StepHead
from trainers.weight_sync.sync import ServerSync

KINDS = ("plain", "checkpointing", "jsd-0", "jsd-1", "policy_gradient")  # objectives whose gradients are compared


def objective(kind: str) -> tuple[GRPO | Distillation, list[Sample]]:
    """Whose gradients are compared, and of which samples: GRPO, or a loss of distillation with its beta."""
    samples = make_samples(seed=3, step=1, count=5)
    if kind in ("plain", "checkpointing"):
        return GRPO(grpo_config(gradient_checkpointing=kind == "checkpointing", bf16=False)), samples
    fields = {"loss": "policy_gradient"} if kind == "policy_gradient" else {"beta": float(kind.removeprefix("jsd-"))}
    algorithm = Distillation(distillation_config(teacher_balance=True, bf16=False, **fields))
    taught(samples, 4, algorithm.config.teachers, top_k=3 if algorithm.dense else 0)
    algorithm.step(samples)
    return algorithm, samples


def gradients(ranks: Ranks, folder: Path) -> None:
    """The step's gradients in float64; one cell stays empty."""
    algorithm, samples = objective(folder.name)
    policy = tiny_policy(algorithm.config, torch.float64, ranks)
    micro = 4 // ranks.world_size
    teachers = algorithm.config.teachers if isinstance(algorithm, Distillation) else ()
    step = pack_step(1, spread(len(samples), micro, ranks.world_size), samples, {}, teachers)
    if ranks.world_size > 1:
        assert all(isinstance(p, DTensor) for p in policy.parameters()), "parameters are not sharded"
    for row in (microbatch[ranks.rank] for microbatch in step.rows):
        batch = PackedBatch.from_row(row, ranks.device, torch.float64)
        outputs = policy(batch)
        if batch.terms:
            normalise(algorithm.loss(loss_inputs(outputs, batch)), step.totals, ranks.world_size).backward()
        else:
            outputs[0].sum().backward()
    grads = {name: full(p.grad) for name, p in policy.model.named_parameters() if p.grad is not None}
    if ranks.is_main:
        torch.save({name: grad.cpu() for name, grad in grads.items()}, folder / f"gradients-{ranks.world_size}.pt")


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return dict(gathered_parameters(policy.model, None, keep=True))


def train(ranks: Ranks, folder: Path, until: int, out: str) -> None:
    """Go on from the newest checkpoint, if any, up to step `until`; the data has six steps."""
    config = grpo_config(output_dir=str(folder / out), max_steps=6, save_steps=3, bf16=False)
    policy = tiny_policy(config, torch.float32, ranks)
    source = FakeSource(steps=until) if ranks.is_main else None
    if source is not None:
        source.micro = 2
    loop = TrainLoop(config, GRPO(config), policy, ranks, source, sink=PrintSink())
    result = loop.run(latest_whole(config.output_dir))
    assert result.step == until, result
    whole = weights(policy)
    if ranks.is_main:
        torch.save(whole, folder / f"{out}-{until}-{ranks.world_size}.pt")
        history = [e["loss"] for e in loop.callbacks.state.log_history]
        (folder / f"{out}-{until}-{ranks.world_size}.json").write_text(json.dumps(history))


def failures(ranks: Ranks, folder: Path) -> None:
    """What only rank 0 sees reaches the others: a refused sync, a dead source."""
    seen: list[str] = []
    config = grpo_config(output_dir=str(folder / f"rank-{ranks.rank}"), weight_check_steps=1, bf16=False)
    policy = tiny_policy(config, torch.float32, ranks)
    plane = FakeControlPlane(fail={"update": ["no room", "no room"]})
    sync = ServerSync(config, ranks, None, [plane])  # type: ignore[arg-type]
    try:
        sync.push(policy, 0)
    except LoopwrightError as error:
        seen.append(f"{type(error).__name__}: {error}")
    sync.close()
    if ranks.is_main:
        assert not plane.paused
    source = FakeSource(fail_at=1) if ranks.is_main else None
    try:
        TrainLoop(config, GRPO(config), policy, ranks, source, sink=PrintSink()).run()
    except LoopwrightError as error:
        seen.append(f"{type(error).__name__}: {error}")
    (folder / f"seen-{ranks.rank}.json").write_text(json.dumps(seen))


class Mortal(RolloutProcess):
    """Killed between saying what a step is and giving its rows."""

    def next_step(self, index: int, train_version: int) -> StepHead | None:
        head = super().next_step(index, train_version)
        if index == 2:
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)
        return head


def recorded(ranks: Ranks, folder: Path, out: str, process: type[RolloutProcess] = RolloutProcess) -> None:
    """An epoch of recorded rows from a real rollout process, whose rows every rank fetches itself; four samples a step."""
    data, tokenizer = folder / "rows.jsonl", folder / "tokenizer"
    if ranks.is_main:
        lines = [json.dumps({"prompt": f"{i}+{i}=", "completion": str(2 * i) * (1 + i % 3)}) for i in range(21)]
        data.write_text("\n".join(lines))
        build_tokenizer().save_pretrained(tokenizer)
    ranks.barrier()
    config = SFTConfig(
        model=str(tokenizer),
        dataset={"path": str(data)},  # type: ignore[arg-type]
        output_dir=str(folder / out),
        optim="sgd",  # Adam would divide rounding in near-zero gradients by itself
        learning_rate=0.1,
        token_budget=0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // ranks.world_size,
        max_length=64,
        save_steps=100,
        bf16=False,
    )
    policy = tiny_policy(config, torch.float32, ranks)
    source = process(config) if ranks.is_main else None
    loop = TrainLoop(config, SFT(config), policy, ranks, source, sink=PrintSink())
    result = loop.run()
    assert (result.step, result.stopped) == (6, "data"), result
    whole = weights(policy)
    if ranks.is_main:
        torch.save(whole, folder / f"{out}.pt")


def dead_process(ranks: Ranks, folder: Path) -> None:
    """The rollout process dies while every rank fetches its rows."""
    try:
        recorded(ranks, folder, "mortal", Mortal)
    except LoopwrightError as error:
        (folder / f"dead-{ranks.rank}.txt").write_text(f"{type(error).__name__}: {error}")


def scenarios(ranks: Ranks, folder: Path) -> None:
    """Everything that is compared between one rank and two."""
    for name in KINDS:
        (folder / name).mkdir(exist_ok=True)
        ranks.barrier()
        gradients(ranks, folder / name)
    train(ranks, folder, 6, f"straight-{ranks.world_size}")
    train(ranks, folder, 3, f"halves-{ranks.world_size}")
    train(ranks, folder, 6, f"halves-{ranks.world_size}")
    recorded(ranks, folder, f"recorded-{ranks.world_size}")


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    ranks = init_distributed(120)
    scenarios(ranks, folder)
    train(ranks, folder, 6, "from-1")  # a checkpoint that one rank wrote
    failures(ranks, folder)
    dead_process(ranks, folder)
    shutdown_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
