"""Give the shared server its own weights again under a policy version, as a trainer's sync does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from tests.conftest import SharedServer


def number_weights(server: SharedServer, version: int) -> None:
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        calls = [
            ("/pause?mode=keep&clear_cache=true", None),
            ("/init_weight_transfer_engine", {"init_info": {"directory": str(server.model_dir)}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"path": str(server.model_dir / "model.safetensors")}}),
            ("/finish_weight_update", {"weight_version": str(version)}),
            ("/resume", None),
        ]
        for path, body in calls:
            client.post(path, json=body).raise_for_status()
