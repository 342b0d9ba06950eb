"""A resumed run of an adapter: its servers hold the checkpoint's adapter before they are asked for the first completion.

No index of what was served is kept in a checkpoint: servers are fresh, or hold what the process before has left, which may be
newer than the checkpoint. Conversations, the only ones that need older versions, end with their process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_adapters import FakeAdapterServer
from tests.support.fake_engine import CharTokenizer, fake_config
from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.pools import until
from tests.support.rollout_runs import by_rank
from tests.support.stub_server import StubServer
from tests.support.tiny_model import build_tokenizer
from trainers import lora
from trainers.adapters import adapter_name, version_of
from trainers.algorithms.grpo import GRPO
from trainers.callbacks import PrintSink
from trainers.checkpoint import latest_whole
from trainers.loop import TrainLoop
from trainers.model import Policy
from trainers.rollouts.build import build_engine
from trainers.rollouts.payload import Payload
from trainers.weight_sync.sync import ServerSync


class ToldSource(FakeSource):
    """Notes, in the server's own record, when rollouts may begin and under which name, and when the first step is wanted."""

    def __init__(self, record: list[str], steps: int) -> None:
        super().__init__(steps=steps)
        self.record = record

    def synced(self, version: int, served_as: str | None = None) -> None:
        super().synced(version, served_as)
        self.record.append(f"rollouts may use {served_as}")

    def next_step(self, index: int, train_version: int) -> Any:
        self.record.append(f"step {index}")
        return super().next_step(index, train_version)


def train(folder: Path, server: FakeAdapterServer, steps: int) -> Policy:
    """From the newest checkpoint, if any; what server and source saw is in `server.calls`."""
    config = grpo_config(
        output_dir=str(folder), max_steps=6, save_steps=2, bf16=False, peft={"r": 4}, max_staleness=1, weight_sync="lora"
    )
    policy = tiny_policy(config)
    sync = ServerSync(config, ONE_RANK, build_tokenizer(), [server])
    source = ToldSource(server.calls, steps)
    loop = TrainLoop(config, GRPO(config), policy, ONE_RANK, source, weight_sync=sync, sink=PrintSink())
    loop.run(latest_whole(folder))
    return policy


@pytest.mark.parametrize("survived", [False, True], ids=["fresh server", "server that lived on"])
def test_the_checkpoints_adapter_is_in_the_server_before_rollouts_begin(tmp_path: Path, survived: bool) -> None:
    server = FakeAdapterServer()
    trained = train(tmp_path, server, steps=2)
    kept = {name: parameter.detach().clone() for name, parameter in lora.adapter_parameters(trained.model).items()}
    left = dict(server.held)
    if survived:
        # The process went on for a step after the checkpoint, and was killed.
        left[adapter_name(3, version_run(server))] = None
    again = FakeAdapterServer(held=dict(left) if survived else {})
    train(tmp_path, again, steps=3)

    names = [call for call in again.calls if call.startswith("rollouts may use")]
    first = again.calls.index(names[0])
    before, after = again.calls[:first], again.calls[first:]
    assert "load policy-v2" in before and not [call for call in before if call.startswith("step")], again.calls
    assert version_of(names[0].split()[-1]) == 2 and names[0].split()[-1] not in left, "a name of its own"
    assert after[1] == "step 3"
    assert not set(left) & set(again.held), "what the process before has left is gone"
    served = again.held[names[0].split()[-1]].state_dict()
    for name, parameter in kept.items():
        assert torch.equal(served[f"base_model.model.{name}"], parameter), name


def version_run(server: FakeAdapterServer) -> str:
    """Of the process whose adapters the server holds."""
    return next(iter(server.held)).rsplit("-", 1)[-1]


async def test_a_resumed_rollout_process_asks_for_nothing_until_it_is_told_the_adapter() -> None:
    stub = StubServer()
    name = adapter_name(2, "bbbbbb")
    async with stub.run():
        config = fake_config(vllm_server_base_url=stub.url, num_generations=3, per_device_train_batch_size=6)
        rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]
        payload = Payload(reward_funcs=[by_rank], dataset=rows, tokenizer=CharTokenizer())
        engine, _ = await build_engine(
            config, payload, version=2, resume_step=2, resume_dir=None, world_size=1, say=lambda doing: None
        )
        engine.start()
        try:
            wanted = asyncio.create_task(engine.step(3, 2))
            await until(lambda: "waits for the trainer to sync weights" in engine.describe())
            assert stub.requests == []
            engine.synced(2, name)
            step = await asyncio.wait_for(wanted, 60)
        finally:
            await engine.close()
    assert step is not None and {request["model"] for request in stub.requests} == {name}
