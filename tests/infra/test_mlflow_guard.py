"""The password in front of a shared MLflow: what passes, and that MLflow finds the application by its name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.mlflow_guard import APP_NAME, PLUGIN, PasswordMiddleware
from infra.mlflow_server import command, guarded


async def behind(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data"})


def client(user: str = "loopwright", password: str = "right") -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(PasswordMiddleware(behind, user, password)), base_url="http://mlflow"
    )


async def test_only_the_password_opens_anything_but_the_health_page() -> None:
    async with client() as asked:
        for path in (
            "/",
            "/api/2.0/mlflow/runs/get",
            "/ajax-api/2.0/mlflow/runs/get",
            "/graphql",
            "/health/",
            "/x/health",
            "//health",
        ):
            for method in ("GET", "POST", "OPTIONS"):
                answer = await asked.request(method, path)
                assert answer.status_code == 401 and b"data" not in answer.content, (method, path)
                assert answer.headers["www-authenticate"].startswith("Basic")
        assert (await asked.get("/health")).status_code == 200
        assert (await asked.post("/health")).status_code == 401
        for login in (("loopwright", "wrong"), ("other", "right"), ("loopwright", ""), ("", "")):
            assert (await asked.get("/", auth=login)).status_code == 401
        assert (await asked.get("/", auth=("loopwright", "right"))).content == b"data"
        bearer = {"Authorization": "Bearer bG9vcHdyaWdodDpyaWdodA=="}
        assert (await asked.get("/", headers=bearer)).status_code == 401
        twice = [("Authorization", "Basic bG9vcHdyaWdodDpyaWdodA=="), ("Authorization", "Basic x")]
        assert (await asked.get("/", headers=twice)).status_code == 401


async def test_a_web_socket_without_the_password_is_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await PasswordMiddleware(behind, "u", "p")({"type": "websocket", "path": "/ws", "headers": []}, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_there_is_no_server_without_a_password() -> None:
    with pytest.raises(RuntimeError, match="MLFLOW_TRACKING_PASSWORD are not set"):
        PasswordMiddleware(behind, "loopwright", "")


def test_mlflow_finds_it_and_no_password_is_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = (each for each in importlib.metadata.distributions(path=[str(PLUGIN)]))
    assert [(point.group, point.name, point.value) for point in found.entry_points] == [
        ("mlflow.app", APP_NAME, "infra.mlflow_guard:app")
    ]
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "postgresql://me:of-the-database@db/mlflow")
    arguments, environment = guarded(command(5000, host="10.0.0.5", remote=True), {"PYTHONPATH": "/mine", "X": "1"})
    assert arguments[-2:] == ["--app-name", "loopwright"] and "--host 10.0.0.5" in " ".join(arguments)
    assert "of-the-database" not in " ".join(arguments) and "--backend-store-uri" not in arguments
    assert "--artifacts-destination" in arguments and "--no-serve-artifacts" not in arguments
    assert environment == {"PYTHONPATH": f"{PLUGIN}:/mine", "X": "1"}
    monkeypatch.delenv("MLFLOW_BACKEND_STORE_URI")
    assert "--backend-store-uri" in command(5000) and "--no-serve-artifacts" in command(5000)
    monkeypatch.setenv("MLFLOW_DEFAULT_ARTIFACT_ROOT", "s3://bucket/mlflow")
    assert "--no-serve-artifacts" in command(5000, remote=True) and "--default-artifact-root" not in command(5000)
