"""The doctor on this machine as it is, and with each thing broken that it looks at."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows import doctor
from flows.cli import cli
from infra import checkup
from infra.checkup import Finding
from infra.registry import Registry, default_url
from infra.vllm_features import Features

FULL = frozenset({"weight_transfer_config", "enable_lora", "return_sampling_mask"})


@contextmanager
def answering(status: int, body: bytes = b"{}", kind: str = "application/json", key: str | None = None) -> Iterator[str]:
    """An HTTP server that answers everything so; with `key` only to that Authorization header, else 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status if key in (None, self.headers.get("Authorization")) else 401)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def one(findings: Iterator[Finding]) -> Finding:
    (found,) = findings
    if found.status != "ok":
        assert found.remedy
    return found


def test_a_machine_that_can_run_things(home: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0, done.output
    areas = {line.split()[1] for line in done.output.splitlines() if not line.startswith(" ")}
    assert areas == {"packages", "GPU", "vLLM", "ports", "storage", "database", "tracking", "Prefect"}


def test_as_json_and_exit_code_one_when_something_is_broken(home: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json", "--python", "/no/python"])
    findings = [Finding(**item) for item in json.loads(done.output)]
    assert done.exit_code == 1
    (broken,) = [finding for finding in findings if finding.status == "fail"]
    assert broken.area == "vLLM" and "there is no program /no/python" in broken.text and broken.remedy


def test_a_home_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path / "file" / "home"))
    failed = {finding.area: finding.text for finding in doctor.examine() if finding.status == "fail"}
    assert {"storage", "database"} <= set(failed)
    assert "cannot be made" in failed["storage"]


def test_a_check_that_breaks_is_a_finding(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOCK", Path("/proc/self/mem"))
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    broken = [finding for finding in doctor.examine() if "the check broke" in finding.text]
    assert [finding.area for finding in broken] == ["packages"]


@pytest.mark.parametrize(
    ("version", "status"), [("0.25.9", "fail"), ("0.26.0", "ok"), ("0.32.1+cpu", "ok"), ("0.33.0", "warn"), ("unknown", "fail")]
)
def test_vllm_versions(version: str, status: str) -> None:
    assert checkup.version(Features(version, "cpu", FULL, None)).status == status


@pytest.mark.parametrize(("kind", "gpus", "status"), [("cpu", False, "ok"), ("cpu", True, "fail"), ("cuda", False, "fail")])
def test_vllm_builds(kind: str, gpus: bool, status: str) -> None:
    found = checkup.build(Features("0.32.0", kind, FULL, None), gpus)
    assert found.status == status and bool(found.remedy) == (status == "fail")


def test_what_a_vllm_lacks_is_said_with_what_follows() -> None:
    bare = {
        finding.text: finding.status for finding in checkup.capabilities(Features("0.26.0", "cuda", frozenset(), None), True)
    }
    assert {"warn", "fail", "ok"} == set(bare.values())
    assert any("no weight transfer" in text for text, status in bare.items() if status == "fail")
    assert {finding.status for finding in checkup.capabilities(Features("0.32.0", "cuda", FULL, "/vllm-rs"), True)} == {"ok"}


def test_a_plugin_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checkup.plugin().status == "ok"
    monkeypatch.setattr(checkup, "PLUGIN", tmp_path)
    assert checkup.plugin().status == "fail"


def test_ports_that_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(checkup, "PORTS", range(port, port + 1))
        monkeypatch.setattr(checkup, "PORTS_LOOKED_AT", 1)
        found = one(checkup.ports())
    assert found.status == "fail" and "ss -ltnp" in found.remedy


def test_storage_that_cannot_be_written_or_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = tmp_path / "no-shm"
    (tmp_path / "file").touch()
    assert one(checkup.storage(tmp_path / "file" / "x", "here", none)).status == "fail"
    assert one(checkup.storage(tmp_path, "here", none)).status in ("ok", "warn")
    assert list(tmp_path.glob(".loopwright-doctor*")) == []
    monkeypatch.setattr(checkup, "HOME_WARN_GIB", 1e9)
    assert one(checkup.storage(tmp_path, "here", none)).status == "warn"
    monkeypatch.setattr(checkup, "HOME_FAIL_GIB", 1e9)
    assert "GiB free" in one(checkup.storage(tmp_path, "here", none)).text
    monkeypatch.setattr(checkup, "SHM_WARN_GIB", 1e9)
    assert [finding.remedy for finding in checkup.storage(tmp_path, "here", tmp_path)][1].endswith("--shm-size=8g")


def test_a_registry_that_is_no_database(home: Path) -> None:
    (home / "registry.db").write_text("words " * 500)
    found = one(checkup.database(default_url()))
    assert found.status == "fail" and "not a database" in found.text


def test_a_registry_that_another_process_holds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "DATABASE_WAIT_S", 0.05)
    Registry(default_url())
    with sqlite3.connect(home / "registry.db", isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        found = one(checkup.database(default_url()))
        holder.execute("ROLLBACK")
    assert found.status == "fail" and "locked" in found.text and "fuser" in found.remedy
    assert one(checkup.database(default_url())).status == "ok"


def test_tracking_over_http(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    with answering(200, key="Basic bWU6c2VjcmV0") as url:
        refused = one(doctor.tracking(url))
        assert refused.status == "fail" and "MLFLOW_TRACKING_USERNAME" in refused.remedy
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        assert one(doctor.tracking(url)).status == "ok"
    with answering(200, b"<html>", "text/html") as url:
        assert "is not MLflow" in one(doctor.tracking(url)).text
    found = one(doctor.tracking(f"http://user:hidden@127.0.0.1:{unused_port}"))
    assert found.status == "fail" and "hidden" not in found.text


def test_tracking_in_a_file(home: Path) -> None:
    path = home / "mlflow" / "mlflow.db"
    assert "is made by the first run" in one(doctor.tracking(f"sqlite:///{path}")).text
    path.write_text("words " * 500)
    assert one(doctor.tracking(f"sqlite:///{path}")).status == "fail"
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    assert one(doctor.tracking(f"sqlite:///{path}")).status == "ok"


def test_prefect_given_or_started_for_each_run(home: Path, monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    assert "each run starts its own" in one(doctor.prefect()).text
    with answering(200, b"0", key="Basic bWU6c2VjcmV0") as url:
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        refused = one(doctor.prefect())
        assert refused.status == "fail" and "PREFECT_API_AUTH_STRING" in refused.remedy
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:secret")
        assert one(doctor.prefect()).status == "ok"
    with answering(404) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert "is no Prefect API" in one(doctor.prefect()).text
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{unused_port}/api")
    assert "no API answers" in one(doctor.prefect()).text


def test_packages_against_a_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    monkeypatch.setattr(doctor, "LOCK", lock)
    lock.write_text("# made\nclick==0.1  # why\nno-such-package-at-all==1\n")
    first, second = doctor.packages()
    assert (first.status, second.status) == ("warn", "warn")
    assert "no-such-package-at-all" in first.text and "click" in second.text and "(lock: 0.1)" in second.text
    monkeypatch.setattr(doctor, "asked_for", lambda: {"no-such-package-at-all": ""})
    assert [finding.status for finding in doctor.packages()] == ["fail", "warn"]
    lock.unlink()
    monkeypatch.undo()
    assert {"torch", "prefect", "nvidia-ml-py"} <= set(doctor.asked_for())


def test_a_torchvision_of_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("torch", "2.13.0+cpu"), ("torchvision", "0.28.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert one(doctor.torchvision()).remedy == "pip uninstall torchvision torchaudio torchcodec"
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0+cpu\n")
    assert list(doctor.torchvision()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deep_starts_a_server(home: Path) -> None:
    (found,) = doctor.server(None)
    assert found.status == "ok", found.text
