"""MLflow's server behind a password: `mlflow server --app-name loopwright` runs `app`, every path but `/health` asks for it.

MLflow's own `basic-auth` app wants a package that MLflow does not install, and brings users and permissions; here one password
is known to all who share the server. The entry point is in `infra/mlflow_plugin`, which the server gets on its PYTHONPATH.
MLflow's clients send MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD by themselves, browsers ask.
"""

from __future__ import annotations

import base64
import hmac
import os
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parent / "mlflow_plugin"
APP_NAME = "loopwright"
OPEN_PATHS = frozenset({"/health"})


class Guard:
    """ASGI middleware: 401 unless the request carries the user and password (HTTP Basic).

    Raises:
        RuntimeError: there is no password to ask for.
    """

    def __init__(self, app: Any, user: str, password: str) -> None:
        if not user or not password:
            raise RuntimeError("MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD are not set, and it asks for both")
        self.app = app
        self._expected = base64.b64encode(f"{user}:{password}".encode())

    def _allowed(self, scope: Any) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"basic" and hmac.compare_digest(token.strip(), self._expected)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):  # "lifespan" has no client
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "password missing or wrong"})
        else:
            body = b'{"error_code": "UNAUTHENTICATED", "message": "password missing or wrong: set MLFLOW_TRACKING_PASSWORD"}'
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b'Basic realm="loopwright mlflow"')]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})


def app() -> Guard:
    """MLflow's application behind the password that its clients use."""
    from mlflow.server.fastapi_app import app as mlflow_app

    return Guard(mlflow_app, os.environ.get("MLFLOW_TRACKING_USERNAME", ""), os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))
