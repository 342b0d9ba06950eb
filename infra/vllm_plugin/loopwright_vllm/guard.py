"""ASGI middleware that lets through who carries one `Authorization` header. Of vLLM's servers, and of a shared MLflow.

Imports nothing but Python, because it is loaded in vLLM's interpreter and in Loopwright's.
"""

import hmac

OPEN_PATHS = frozenset({"/health"})


class Guard:
    """Answers 401 unless a request carries `Authorization: <scheme> <token>`.

    Args:
        challenge: what `WWW-Authenticate` says.
        body: JSON of the answer; web sockets are told `reason`.
    """

    def __init__(self, app, scheme: str, token: bytes, challenge: bytes, body: bytes, reason: str):
        self.app = app
        self._expected = scheme.lower().encode() + b" " + token
        self._challenge, self._body, self._reason = challenge, body, reason

    def _allowed(self, scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + token.strip(), self._expected)

    async def __call__(self, scope, receive, send):
        # "lifespan" has neither headers nor a client.
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": self._reason})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", self._challenge)]
            headers.append((b"content-length", str(len(self._body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": self._body})
