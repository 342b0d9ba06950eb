"""ASGI middleware that wants the server's key on every path but `/health`.

vLLM's own check covers `/v1`, `/v2`, `/inference` and `/cohere` only and leaves the control plane (/pause, /update_weights,
/collective_rpc, /server_info, /metrics …) open.
"""

import hmac
import os

from loopwright_vllm.control import Control

OPEN_PATHS = frozenset({"/health"})


class KeyMiddleware:
    """Answers 401 unless the request carries `Authorization: Bearer <VLLM_API_KEY>`."""

    def __init__(self, app):
        key = os.environ.get("VLLM_API_KEY", "")
        if not key:
            raise RuntimeError("VLLM_API_KEY is not set: this server refuses to run without a key")
        self.app = Control(app)
        self.expected = b"bearer " + key.encode()

    def _allowed(self, scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + token.strip(), self.expected)

    async def __call__(self, scope, receive, send):
        # "lifespan" has neither headers nor a client.
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "key missing or wrong"})
        else:
            body = b'{"error": "key missing or wrong: send Authorization: Bearer $VLLM_API_KEY"}'
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
