"""One rank of the weight sync test: `torchrun … sync_worker.py FOLDER`. Two hundred syncs of a sharded policy, some refused,
with a server that comes in their midst."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.support.fake_control_plane import FakeControlPlane, served_logprobs
from tests.support.policies import grpo_config, tiny_policy
from trainers.distributed import full, init_distributed, shutdown_distributed
from trainers.errors import WeightSyncError
from trainers.roster import Listed, write_servers
from trainers.weight_sync.sync import ServerSync

SYNCS, COMES_AT = 200, 100


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = init_distributed(120)
    config = grpo_config(output_dir=str(folder), weight_check_steps=50, bf16=False)
    policy = tiny_policy(config, torch.float32, ranks)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters()), "parameters are not sharded"
    planes = [FakeControlPlane(url=f"http://s{index}", reference=served_logprobs) for index in range(2)]
    late = FakeControlPlane(url="http://late", reference=served_logprobs)
    sync = ServerSync(config, ranks, None, planes, connect={late.url: late}.__getitem__)
    choose, refused, behind = random.Random(0), 0, 0
    for version in range(SYNCS):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.001)
        for plane in planes:
            kind = choose.random()
            plane.fail = {"update": ["once"] if kind < 0.1 else ["once", "twice"] if kind < 0.2 else []}
        try:
            sync.push(policy, version)
        except WeightSyncError:
            refused += 1
        whole = {name: full(parameter.detach()) for name, parameter in policy.model.named_parameters()}
        if ranks.is_main:
            assert (late.version == str(version) and not late.paused) if version > COMES_AT else not late.weights
            for plane in planes:
                assert not plane.paused, f"{plane.url} was left paused at version {version}"
                if plane.version != str(version):
                    behind += 1
                    continue
                assert all(torch.equal(plane.weights[name], tensor) for name, tensor in whole.items()), version
        if version == COMES_AT:
            if ranks.is_main:
                write_servers(folder, [Listed(url, url) for url in ("http://s0", "http://s1", late.url)])
            sync.admit(policy, version)
            if ranks.is_main:
                assert all(torch.equal(late.weights[name], tensor) for name, tensor in whole.items())
    sync.close()
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps({"refused": refused, "behind": behind}))
    shutdown_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
