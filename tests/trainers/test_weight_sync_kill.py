"""A real server is killed in mid-sync while another remains: the other has the weights, and the replacement gets them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from infra.leases import LeaseManager
from infra.process import marked
from infra.registry import Registry
from infra.vllm import ServerSpec, VLLMServer, start_server
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from tests.trainers.test_weight_sync_ways import WAYS, FiveCalls
from trainers.server import ServerClient
from trainers.weight_sync.sync import ServerSync

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]


class Doomed(FiveCalls):
    """Its server is killed right before the call that `at` names."""

    at: str | None = None
    lease = ""

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        if self.at is not None and path.startswith(self.at):
            self.at = None
            for pid in marked(self.lease):
                os.kill(pid, signal.SIGKILL)
        return super()._call(method, path, body, timeout_s)


@pytest.mark.parametrize("way", ["file", "gloo"])
def test_a_server_killed_between_two_calls_of_a_sync(vllm_server, tmp_path, monkeypatch, way):
    monkeypatch.setenv("LOOPWRIGHT_WEIGHT_DIRS", str(tmp_path / "weights"))
    config = grpo_config(vllm_server_timeout=120, weight_check_steps=1, output_dir=str(tmp_path))
    version = 0
    with LeaseManager(Registry(tmp_path / "registry.db")) as leases:
        port = leases.lease_port()

        def start() -> VLLMServer:
            server = start_server(
                ServerSpec(str(vllm_server.model_dir), name="doomed", device="cpu"),
                port,
                key=vllm_server.key,
                log_path=tmp_path / "log",
            )
            server.wait_ready()
            return server

        server = start()
        alive, doomed = ServerClient(vllm_server.url, 120, vllm_server.key), Doomed(server.url, 120, server.api_key)
        doomed.lease = port.id
        sync = ServerSync(config, ONE_RANK, build_tokenizer(), [alive, doomed], WAYS[way](tmp_path))
        for at in ("/start_weight_update", "/finish_weight_update"):  # after the pause; after the transfer
            version += 1
            sync.push(tiny_policy(seed=version), version)
            assert len(sync.members.inside) == 2
            doomed.at, version = at, version + 1
            sync.push(tiny_policy(seed=version), version)
            assert [member.client for member in sync.members.inside] == [alive]
            assert alive.weight_version() == str(version) and not alive.is_paused()
            server.stop()
            server = start()
            # The next sync brings it everything, before it counts as a member.
            version += 1
            sync.push(tiny_policy(seed=version), version)
            assert doomed.weight_version() == alive.weight_version() == str(version)
        sync.close()
        server.stop()
