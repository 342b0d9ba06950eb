"""`loopwright up --shared`: nothing answers without a key, a run of a flow ends with them, and no secret is left anywhere.

One scenario, because services take longest to start: canary secrets of every kind are set, a run goes through all of it, and
then everything that was written, and every command line that was seen meanwhile, is searched for them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from flows import connections, services, sharing
from flows.sharing import shared_host
from infra.errors import InfraError
from infra.keys import keys_file, read_keys
from infra.registry import Registry
from tests.flows.runs_for_real import processes, services_up, sft_config, trigger, wait_for_end
from trainers.errors import ConfigError

CANARIES = {
    "VLLM_API_KEY": "canary-vllm-5f1c",
    "HF_TOKEN": "hf_canarycanarycanary77",
    "AWS_ACCESS_KEY_ID": "AKIACANARY0000000000",
    "AWS_SECRET_ACCESS_KEY": "canary/aws/secret/91",
    "WANDB_API_KEY": "canary-wandb-0c2d",
    "JUDGE": "canary-judge-18aa",  # of a keyword argument, by reference
    "MODEL_SECRET": "canary-model-77be",
    "LOOPWRIGHT_NOTIFY_URL": "http://127.0.0.1:9/canary-hook-3d3d",
}

REWARD = """
import os, sys

def reward(completions, judge, **columns):
    assert judge == "canary-" + "judge-18aa", "the reference was resolved"
    print("printed by the reward:", judge, os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["MODEL_SECRET"], flush=True)
    print("and in", dict(os.environ), file=sys.stderr, flush=True)
    return [1.0 for _ in completions]
"""

# In a process of its own: the import warns, and makes a server of the process.
MLFLOW_ROUTES = """
import json
from mlflow.server import app
from mlflow.server.fastapi_app import app as outer
paths = {rule.rule for rule in app.url_map.iter_rules()} | {getattr(route, "path", "/") for route in outer.routes}
print(json.dumps(sorted(paths)))
"""


@pytest.fixture
def shared(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[connections.Up]:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    ports = ("--prefect-port", "0", "--mlflow-port", "0")
    with services_up(home, tmp_path / "up.out", "--shared", "--host", "127.0.0.1", *ports) as up:
        assert up.shared and up.tracked
        yield up


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nothing_answers_without_a_key_and_a_run_leaves_no_secret(shared: connections.Up, home: Path, tmp_path: Path) -> None:
    _walk_prefect(shared)
    _walk_mlflow(shared)
    with CommandLines(home) as seen:
        _a_run_to_its_end(shared, tmp_path)
    assert any("trainers.main" in line for line in seen.lines), "the trainer's command line was seen"

    keys = read_keys()
    mine = {**CANARIES, "keys.prefect": keys.prefect_password, "keys.mlflow": keys.mlflow_password}
    for name, value in mine.items():
        assert not [line for line in seen.lines if value in line], f"{name} is on a command line"
    assert stat.S_IMODE(keys_file().stat().st_mode) == 0o600
    found = {name: [str(path) for path in _files_with(value, home, tmp_path)] for name, value in mine.items()}
    logs = (home / "runs" / "canary" / "logs").glob("evaluate-*.log")
    assert any("printed by the reward: (removed) (removed) (removed)" in log.read_text() for log in logs)
    assert {name: paths for name, paths in found.items() if paths} == {
        "keys.prefect": [str(keys_file())],
        "keys.mlflow": [str(keys_file())],
    }


def _a_run_to_its_end(up: connections.Up, folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD)
    config = sft_config(folder, "canary", rows=8, per_device_train_batch_size=2)
    config["model_init_kwargs"] = {"token": "${oc.env:MODEL_SECRET}"}
    config["eval"] = {
        "dataset": {**config["dataset"], "max_rows": 1},
        "reward_func": {"path": f"{folder}/reward.py:reward", "kwargs": {"judge": "${oc.env:JUDGE}"}},
    }
    auth = connections.prefect_login(connections.client_environment(up, environ={}))
    with httpx.Client(base_url=up.prefect_url, auth=auth, timeout=30.0, trust_env=False) as api:
        ended = wait_for_end(api, trigger(api, config), 400)
    run = Registry().get_run("canary")
    assert (ended["type"], run.status) == ("COMPLETED", "FINISHED"), (ended["message"], run.cause)
    assert run.stages["train"]["step"] == 2 and run.stages["evaluate"]["accuracy"] == 1.0
    uri = json.loads((Path(str(run.output_dir)) / "tracking" / "state.json").read_text())["uri"]
    assert uri == up.mlflow_url, "tracked through the server"
    login = connections.mlflow_login(connections.client_environment(up, environ={}))
    answer = httpx.get(f"{uri}/api/2.0/mlflow/runs/get", params={"run_id": run.mlflow_run_id}, auth=login, trust_env=False)
    assert answer.json()["run"]["info"]["status"] == "FINISHED"


def _walk_prefect(up: connections.Up) -> None:
    """Every route of the API page, which itself is asked for with the key."""
    login = connections.prefect_login(connections.client_environment(up, environ={}))
    with httpx.Client(timeout=30.0, trust_env=False) as client:
        page = client.get(f"{up.prefect_url}/openapi.json", auth=login).raise_for_status().json()
        base = up.prefect_url.removesuffix("/api")
        answered = {}
        for path, methods in page["paths"].items():
            url = base + (path if path.startswith("/api/") else f"/api{path}")
            for method in methods:
                answered[f"{method} {path}"] = client.request(method, url.replace("{", "").replace("}", "")).status_code
        assert len(answered) > 150
        opened = {route for route, status in answered.items() if status != 401}
        assert opened <= {"get /api/health", "get /api/ready", "get /health", "get /ready"}, opened
        assert client.post(f"{up.prefect_url}/flows/count", json={}, auth=("loopwright", "wrong")).status_code == 401
        assert client.post(f"{up.prefect_url}/flows/count", json={}, auth=login).status_code == 200
    _websockets_are_closed(up)


def _websockets_are_closed(up: connections.Up) -> None:
    from websockets.exceptions import ConnectionClosed, InvalidHandshake
    from websockets.sync.client import connect

    for path in ("/events/in", "/events/out", "/logs/out"):
        url = up.prefect_url.replace("http", "ws", 1) + path
        for hello in ({"type": "auth", "token": "wrong"}, {"type": "auth"}, {"type": "filter", "filter": {}}):
            with suppress(ConnectionClosed, InvalidHandshake), connect(url, subprotocols=["prefect"], proxy=None) as socket:  # type: ignore[list-item]
                socket.send(json.dumps(hello))
                pytest.fail(f"{path} answered {socket.recv(timeout=30)!r} to {hello}")
        with suppress(ConnectionClosed, InvalidHandshake), connect(url, proxy=None) as socket:
            socket.send(json.dumps({"type": "filter", "filter": {}}))
            pytest.fail(f"{path} answered {socket.recv(timeout=30)!r} without the subprotocol")


def _walk_mlflow(up: connections.Up) -> None:
    """Every route that the application has, as the server knows them."""
    listed = subprocess.run([sys.executable, "-W", "ignore", "-c", MLFLOW_ROUTES], capture_output=True, text=True, check=True)
    paths = set(json.loads(listed.stdout.splitlines()[-1]))
    assert len(paths) > 100
    login = connections.mlflow_login(connections.client_environment(up, environ={}))
    with httpx.Client(base_url=str(up.mlflow_url), timeout=30.0, trust_env=False) as client:
        for path in sorted(paths - {"/health"}):
            url = path.translate(str.maketrans("", "", "<>{}"))
            for method in ("GET", "POST"):
                assert client.request(method, url).status_code == 401, f"{method} {path}"
        search = "/api/2.0/mlflow/experiments/search"
        assert client.post(search, json={"max_results": 1}, auth=("loopwright", "wrong")).status_code == 401
        assert client.post(search, json={"max_results": 1}, auth=login).status_code == 200
        assert client.get("/", auth=login).status_code == 200
        assert client.get("/health").status_code == 200


class CommandLines:
    """Command lines of all processes of a home, looked at all the time."""

    def __init__(self, home: Path) -> None:
        self.lines: set[str] = set()
        self._home, self._over = home, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for pid in processes(self._home):
                with suppress(OSError):
                    self.lines.add(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))


def _files_with(secret: str, *folders: Path) -> Iterator[Path]:
    """Files that hold it; a database's journal is looked at as well as its pages."""
    seen = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path not in seen:
                seen.add(path)
                if path.suffix == ".db":
                    with suppress(sqlite3.Error), sqlite3.connect(path) as database:
                        database.execute("PRAGMA wal_checkpoint")
                    database.close()
                with suppress(FileNotFoundError):
                    if secret.encode() in path.read_bytes():
                        yield path


def test_keys_are_made_once_and_only_their_owner_may_read_them(home: Path) -> None:
    first = read_keys()
    assert read_keys() == first and len(first.mlflow_password) >= 32 and first.prefect_password != first.mlflow_password
    assert first.client_environment()["PREFECT_API_AUTH_STRING"] == f"loopwright:{first.prefect_password}"
    os.chmod(keys_file(), 0o644)
    with pytest.raises(InfraError, match="may be read by others: `chmod 600"):
        read_keys()
    os.chmod(keys_file(), 0o600)
    keys_file().write_text("{}")
    with pytest.raises(InfraError, match="delete it, and new ones are made"):
        read_keys()


def test_only_a_private_address_of_this_machine_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Address:
        def __init__(self, address: str) -> None:
            self.family, self.address = 2, address

    found = {"lo": [Address("127.0.0.1")], "eth0": [Address("10.1.2.3")], "eth1": [Address("93.184.215.14")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert shared_host(None) == "10.1.2.3"
    assert shared_host("127.0.0.1") == "127.0.0.1"
    for host in ("93.184.215.14", "0.0.0.0", "10.9.9.9", "example.org"):
        with pytest.raises(ConfigError, match="no private address of this machine"):
            shared_host(host)
    found["tun0"] = [Address("100.64.1.1")]
    with pytest.raises(ConfigError, match=r"2 private addresses \(10.1.2.3, 100.64.1.1\): name one by --host"):
        shared_host(None)
    with pytest.raises(ConfigError, match="--host is for --shared"):
        services.start(host="10.1.2.3")


def test_a_process_gets_the_keys_of_what_is_up_here_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = connections.Up(1, 1.0, 4200, "http://10.0.0.1:4200/api", "http://10.0.0.1:5000", "w", "10.0.0.1", True, True)
    keys = read_keys()
    assert connections.client_environment(up, {}) == {
        **keys.client_environment(),
        "MLFLOW_TRACKING_URI": "http://10.0.0.1:5000",
    }
    elsewhere = {"PREFECT_API_URL": "http://other/api", "MLFLOW_TRACKING_URI": "http://other"}
    assert connections.client_environment(up, elsewhere) == {}, "keys are not sent to another server"
    alone = connections.Up(1, 1.0, 4200, "http://127.0.0.1:4200/api", "http://127.0.0.1:5000", "w")
    assert connections.client_environment(alone, {}) == {}
    with pytest.raises(ConfigError, match="nothing is shared"):
        sharing.other_machines()
    monkeypatch.setattr(sharing, "running", lambda: up)
    lines = sharing.other_machines()
    assert "export PREFECT_API_URL='http://10.0.0.1:4200/api'" in lines and len(lines) == 5


def test_what_may_be_a_secret_stays_a_reference_in_what_a_flow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.config import resolve_plain

    monkeypatch.setenv("FOLDER", "/data")
    fields = {
        "dataset": {"path": "${oc.env:FOLDER}/rows.jsonl"},
        "hub_token": "${oc.env:NOT_SET}",
        "model_init_kwargs": {"token": "${oc.env:NOT_SET}"},
        "eval": {"reward_func": {"path": "${oc.env:FOLDER}/r.py:r", "kwargs": {"judge": "${oc.env:NOT_SET}"}}},
    }
    found = resolve_plain(fields)
    assert found == {
        **fields,
        "dataset": {"path": "/data/rows.jsonl"},
        "eval": {"reward_func": {**fields["eval"]["reward_func"], "path": "/data/r.py:r"}},  # type: ignore[index]
    }
