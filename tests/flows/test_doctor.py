"""The doctor on this machine as it is, and with each thing broken that it looks at."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner

from flows import doctor
from flows.cli import cli
from infra import checkup
from infra.checkup import Finding
from infra.registry import Registry, default_url
from infra.storage.s3_client import make_client
from infra.vllm_features import Features
from tests.support.answering import answering
from tests.support.postgres import PASSWORD
from tests.support.s3 import S3Server, s3

__all__ = ["s3"]

FULL = frozenset({"weight_transfer_config", "enable_lora", "return_sampling_mask"})


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
    shown = CliRunner().invoke(cli, ["doctor"])
    assert shown.exit_code == 1 and "cannot be made" in shown.stdout and "ports" in shown.stdout


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
    (tmp_path / "file").touch()
    broken = checkup.folder(tmp_path / "file" / "x", "here", "HERE=…")
    assert broken.status == "fail" and broken.remedy == "name another: HERE=…"
    assert checkup.folder(tmp_path, "here", "").status in ("ok", "warn")
    assert list(tmp_path.glob(".loopwright-doctor*")) == []
    monkeypatch.setattr(checkup, "HOME_WARN_GIB", 1e9)
    assert checkup.folder(tmp_path, "here", "").status == "warn"
    monkeypatch.setattr(checkup, "HOME_FAIL_GIB", 1e9)
    full = checkup.folder(tmp_path, "here", "HERE=…")
    assert full.status == "fail" and "GiB free" in full.text and "larger disk: HERE=…" in full.remedy
    assert list(checkup.shared_memory(tmp_path / "no-shm")) == []
    monkeypatch.setattr(checkup, "SHM_WARN_GIB", 1e9)
    assert one(checkup.shared_memory(tmp_path)).remedy.endswith("--shm-size=8g")


def bucket_of(uri: str | None = None) -> Finding:
    """What is said of where checkpoints go, after home and shared memory."""
    *_, found = doctor.storage(uri)
    assert found.area == "storage" and (found.status == "ok" or found.remedy)
    return found


def test_a_bucket_is_written_read_and_left_as_it_was(home: Path, s3: S3Server) -> None:
    found = bucket_of("s3://runs/some/where")
    assert found.status == "ok" and "storage.uri s3://runs/some/where" in found.text and s3.files() == {}


def test_the_bucket_of_this_machines_runs(home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "s3" not in bucket_of().text, "none is named"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("LOOPWRIGHT_STORAGE__ENDPOINT_URL", s3.url)
    monkeypatch.setenv("LOOPWRIGHT_STORAGE__URI", "s3://runs/mine")
    assert bucket_of().status == "ok"
    with s3.down():
        done = CliRunner().invoke(cli, ["doctor", "--json"])
        (failed,) = [item for item in json.loads(done.output) if item["status"] == "fail"]
        assert done.exit_code == 1 and failed["area"] == "storage"
        assert "Could not connect" in failed["text"] and "AWS_ENDPOINT_URL_S3" in failed["remedy"]
    monkeypatch.setenv("LOOPWRIGHT_STORAGE__URI", "s4://runs")
    wrong = bucket_of()
    assert wrong.status == "fail" and "s4:// is no storage" in wrong.text and "LOOPWRIGHT_STORAGE__URI=" in wrong.remedy


@pytest.mark.parametrize(
    ("uri", "environment", "text"),
    [
        ("s3://no-such-bucket/x", {}, "there is no bucket no-such-bucket"),
        ("s3://runs/x", {"AWS_SECRET_ACCESS_KEY": "another-secret"}, "SignatureDoesNotMatch"),
        ("s3://runs/x", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials"),
    ],
)
def test_a_bucket_that_does_not_let_us_in(
    home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, uri: str, environment: dict[str, str], text: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = bucket_of(uri)
    assert found.status == "fail" and text in found.text and "another-secret" not in found.text
    assert "s3:PutObject" in found.remedy


def test_a_bucket_that_may_be_written_and_not_read(home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with rights for writing alone: the service is real, its refusal is the client's."""
    refusal = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetObject")

    def refusing(options: Any) -> Any:
        client = make_client(options)
        client.meta.events.register("before-call.s3.GetObject", refuse)
        return client

    def refuse(**_: Any) -> None:
        raise refusal

    monkeypatch.setattr("infra.storage.s3.make_client", refusing)
    found = bucket_of("s3://runs/x")
    assert found.status == "fail" and "refuses get_object (AccessDenied" in found.text and "s3:GetObject" in found.remedy
    assert s3.files() == {}, "the probe is gone"


def test_a_folder_for_checkpoints(home: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "runs") in bucket_of(f"file://{tmp_path}/runs").text
    (tmp_path / "file").touch()
    assert "LOOPWRIGHT_STORAGE__URI" in bucket_of(str(tmp_path / "file" / "runs")).remedy


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


def test_a_registry_on_a_database_server(postgres_url: str, unused_port: int) -> None:
    found = one(checkup.database(postgres_url))
    assert found.status == "ok" and "127.0.0.1" in found.text and PASSWORD not in found.text
    wrong = one(checkup.database(postgres_url.replace(PASSWORD, "wrong-password")))
    assert wrong.status == "fail" and "password authentication failed" in wrong.text and "wrong-password" not in wrong.text
    assert "LOOPWRIGHT_REGISTRY_URL" in wrong.remedy
    gone = one(checkup.database(f"postgresql+psycopg://me:{PASSWORD}@127.0.0.1:{unused_port}/runs"))
    assert gone.status == "fail" and "start the database" in gone.remedy and PASSWORD not in gone.text


def test_a_database_server_that_never_answers_is_not_waited_for() -> None:
    url = "postgresql+psycopg://me:secret@host/runs"
    assert checkup.impatient(url) == f"{url}?connect_timeout=5"
    assert checkup.impatient(f"{url}?connect_timeout=9") == f"{url}?connect_timeout=9"


@pytest.mark.parametrize("uri", ["postgresql://me:hidden@host/mlflow", "file:///folder", "mlruns"])
def test_tracking_that_no_run_can_write_to(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = one(doctor.tracking(uri))
    assert found.status == "fail" and "hidden" not in found.text and list(tmp_path.iterdir()) == []


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
