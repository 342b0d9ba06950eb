"""ASGI middleware that wants the server's key on every path but `/health`.

vLLM's own check covers `/v1`, `/v2`, `/inference` and `/cohere` only and leaves the control plane (/pause, /update_weights,
/collective_rpc, /server_info, /metrics …) open.
"""

import os

from loopwright_vllm import arrays
from loopwright_vllm.control import Control
from loopwright_vllm.guard import Guard


class KeyMiddleware(Guard):
    """Answers 401 unless the request carries `Authorization: Bearer <VLLM_API_KEY>`."""

    def __init__(self, app):
        key = os.environ.get("VLLM_API_KEY", "").strip()
        if not key:
            raise RuntimeError("VLLM_API_KEY is not set: this server refuses to run without a key")
        arrays.install()
        body = b'{"error": "key missing or wrong: send Authorization: Bearer $VLLM_API_KEY"}'
        # A server that is not in development mode keeps its weights, a teacher's: it offers no sync either.
        inner = Control(app) if os.environ.get("VLLM_SERVER_DEV_MODE") == "1" else app
        super().__init__(inner, "Bearer", key.encode(), b"Bearer", body, "key missing or wrong")
