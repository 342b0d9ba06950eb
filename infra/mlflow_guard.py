"""MLflow's server behind a password: `mlflow server --app-name loopwright` runs `app`, every path but `/health` asks for it.

MLflow's own `basic-auth` app wants a package that MLflow does not install, and brings users and permissions; here one password
is known to all who share the server. The entry point is in `infra/mlflow_plugin`, which the server gets on its PYTHONPATH.
MLflow's clients send MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD by themselves, browsers ask.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from infra.vllm_plugin.loopwright_vllm.guard import Guard

PLUGIN = Path(__file__).parent / "mlflow_plugin"
APP_NAME = "loopwright"


class PasswordMiddleware(Guard):
    """Answers 401 unless the request carries the user and password (HTTP Basic).

    Raises:
        RuntimeError: there is no password to ask for.
    """

    def __init__(self, app: Any, user: str, password: str) -> None:
        if not user or not password:
            raise RuntimeError("MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD are not set, and it asks for both")
        body = b'{"error_code": "UNAUTHENTICATED", "message": "password missing or wrong: set MLFLOW_TRACKING_PASSWORD"}'
        token = base64.b64encode(f"{user}:{password}".encode())
        super().__init__(app, "Basic", token, b'Basic realm="loopwright mlflow"', body, "password missing or wrong")


def app() -> PasswordMiddleware:
    """MLflow's application behind the password that its clients use."""
    from mlflow.server.fastapi_app import app as mlflow_app

    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    return PasswordMiddleware(mlflow_app, user, password)
