"""An MLflow server: what `loopwright up` serves, and what tests talk to.

Data are `<home>/mlflow/mlflow.db` and `<home>/mlflow/artifacts/`: the store that runs without a server write to directly, so
runs tracked before the server was started show up in it. MLflow's own variables put them elsewhere: MLFLOW_BACKEND_STORE_URI
(a database, whose password thus is on no command line), MLFLOW_DEFAULT_ARTIFACT_ROOT (a place clients write to themselves),
MLFLOW_ARTIFACTS_DESTINATION (one the server writes to for them).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from infra.home import home
from infra.mlflow_guard import APP_NAME, PLUGIN

BACKEND_VARIABLE = "MLFLOW_BACKEND_STORE_URI"


class MLflowServerError(RuntimeError):
    """The server ended or did not answer in time; the message ends with the last lines of its log."""


def command(port: int, folder: Path | None = None, host: str = "127.0.0.1", remote: bool = False) -> list[str]:
    """The server's command line.

    Args:
        folder: where its data are; default `<home>/mlflow`, made if it is missing, or what MLflow's variables say.
        remote: clients reach it by HTTP only, so artefacts go through it unless MLFLOW_DEFAULT_ARTIFACT_ROOT names a place
            that they reach themselves.
    """
    given = os.environ if folder is None else {}
    folder = folder or home() / "mlflow"
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    if BACKEND_VARIABLE not in given:
        arguments += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    if "MLFLOW_DEFAULT_ARTIFACT_ROOT" in given:
        arguments.append("--no-serve-artifacts")
    elif not remote:
        # Clients are on this machine and write artefacts themselves; a model does not travel through HTTP.
        arguments += ["--no-serve-artifacts", "--default-artifact-root", (folder / "artifacts").as_uri()]
    elif "MLFLOW_ARTIFACTS_DESTINATION" not in given:
        arguments += ["--artifacts-destination", (folder / "artifacts").as_uri()]
    return arguments


def guarded(arguments: list[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the same server behind the password that `environment` holds for clients."""
    path = os.pathsep.join(filter(None, [str(PLUGIN), environment.get("PYTHONPATH")]))
    return [*arguments, "--app-name", APP_NAME], {**environment, "PYTHONPATH": path}


def environment() -> dict[str, str]:
    """This process's environment, with MLflow's usage telemetry off and its background job workers not started."""
    return {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether an MLflow server answers at `url`. Proxies are not asked."""
    try:
        with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=timeout_s) as response:
            return response.status == 200
    except OSError:
        return False


class MLflowServer:
    """A running server in its own process group.

    Example: `server = MLflowServer.start(5000); server.wait_ready(); …; server.stop()`.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path

    @staticmethod
    def start(port: int, folder: Path | None = None) -> MLflowServer:
        """Start it on loopback `port`. Its output goes to `server.log` in its folder.

        Raises:
            MLflowServerError: something listens on the port; if it were an MLflow, its answers would pass for ours.
        """
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise MLflowServerError(f"port {port} is taken ({error}): choose another one for MLflow") from error
        folder = folder or home() / "mlflow"
        arguments = command(port, folder)
        log_path = folder / "server.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                cwd=folder,
                start_new_session=True,
            )
        return MLflowServer(process, f"http://127.0.0.1:{port}", log_path)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Raises `MLflowServerError` when it ends, or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while not healthy(self.url):
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                what = f"ended with code {code}" if code is not None else f"did not answer within {timeout_s:.0f} s"
                tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])
                raise MLflowServerError(f"the MLflow server at {self.url} {what}; {self.log_path} ends with:\n{tail}")
            time.sleep(0.25)

    def stop(self, grace_s: float = 10.0) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after `grace_s`."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self._signal(signal.SIGKILL)  # whatever of the group outlived its leader
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
