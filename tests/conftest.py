"""Fixtures of all tests: a Loopwright home of their own, and one real vLLM server for everyone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.postgres import postgres_database, postgres_server, postgres_url  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from infra.vllm import VLLMServer

# Before any module of ours is imported: no test may touch the user's own home.
HOME = Path(tempfile.mkdtemp(prefix="loopwright-test-home-"))
os.environ["LOOPWRIGHT_HOME"] = str(HOME)
for variable in ("VLLM_API_KEY", "PREFECT_HOME", "MLFLOW_TRACKING_URI", "LOOPWRIGHT_REGISTRY_URL"):
    os.environ.pop(variable, None)


def pytest_sessionfinish() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


@dataclass
class SharedServer:
    """A real vLLM CPU server with the tiny model of seed 0 (`tests.support.tiny_model`), whose folder is `model_dir`."""

    url: str
    key: str
    model_dir: Path
    server: VLLMServer

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "Connection": "close"}

    def restore(self) -> None:
        """Back to the weights of `model_dir` under the version of a fresh server, not paused."""
        import httpx

        with httpx.Client(base_url=self.url, headers=self.headers, timeout=60) as client:

            def post(path: str, **options: object) -> None:
                client.post(path, **options).raise_for_status()  # type: ignore[arg-type]

            changed = client.get("/weight_info").json()["weight_version"] != "default"
            if changed:
                post("/pause", params={"mode": "keep", "clear_cache": True})
                post("/init_weight_transfer_engine", json={"init_info": {"directory": str(self.model_dir)}})
                post("/start_weight_update")
                post("/update_weights", json={"update_info": {"path": str(self.model_dir / "model.safetensors")}})
                post("/finish_weight_update", json={"weight_version": "default"})
            if changed or client.get("/is_paused").json()["is_paused"]:
                post("/resume")


_shared: SharedServer | None = None


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """Started by the first test that asks for it (about a minute), kept to the end of the session. Do not stop it."""
    global _shared
    from infra.leases import LeaseManager
    from infra.registry import Registry
    from infra.vllm import ServerSpec, start_server
    from tests.support.tiny_model import build_tiny_model

    model_dir = build_tiny_model(tmp_path_factory.mktemp("tiny-model"), seed=0)
    log = tmp_path_factory.mktemp("vllm-server") / "log"
    with LeaseManager(Registry(HOME / "vllm-server.db")) as leases:
        server = start_server(ServerSpec(str(model_dir), name="shared", device="cpu"), leases.lease_port(), log_path=log)
        try:
            server.wait_ready()
            _shared = SharedServer(server.url, server.api_key, model_dir, server)
            yield _shared
        finally:
            _shared = None
            server.stop()


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_the_server_as_it_was() -> Iterator[None]:
    yield
    if _shared is not None and _shared.server.alive():
        _shared.restore()
