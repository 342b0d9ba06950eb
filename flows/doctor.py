"""`loopwright doctor`: whether a run would find what it needs on this machine, and what to do where it would not.

    GPUs · vLLM · ports · storage · database (infra.checkup) · tracking · Prefect · packages ──▶ findings ──▶ exit code

Takes seconds: nothing is imported that is slow to import, nothing is started. `--deep` also starts a vLLM server with a tiny
model, has it generate, and stops it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
from pydantic import ValidationError

from flows.config import StorageConfig
from flows.config_file import ConfigErrors, file_layers
from infra import checkup
from infra.checkup import Finding
from infra.errors import InfraError
from infra.gpus import visible_gpus

ANSWER_S = 5.0
SHOWN = 6
LOCK = Path(__file__).parents[1] / "requirements.lock"
OURS = "loopwright"


def examine(python: str | None = None, deep: bool = False, uri: str | None = None) -> list[Finding]:
    """Every finding, in the order in which a run would meet them. A check that breaks is a finding too.

    Args:
        uri: see `storage`.
    """
    from infra.registry import default_url
    from infra.tracking import default_uri

    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("packages", packages),
        ("GPU", checkup.gpus),
        ("vLLM", lambda: checkup.vllm(python, bool(visible_gpus()))),
        ("ports", checkup.ports),
        ("storage", lambda: storage(uri)),
        ("database", lambda: checkup.database(default_url())),
        ("tracking", lambda: tracking(default_uri())),
        ("Prefect", prefect),
    ]
    if deep:
        checks.append(("server", lambda: server(python)))
    findings: list[Finding] = []
    for area, check in checks:
        try:
            findings.extend(check())
        except InfraError as error:
            findings.append(Finding(area, "fail", str(error), "name another folder, or start without: see the cause"))
        except Exception as error:
            remedy = "what this check needs is broken itself: see the cause"
            findings.append(Finding(area, "fail", f"the check broke: {type(error).__name__}: {error}", remedy))
    return findings


def print_findings(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], ensure_ascii=False, indent=1))
        return
    for finding in findings:
        click.echo(f"{finding.status:<4}  {finding.area:<8}  {finding.text}")
        if finding.remedy and finding.status != "ok":
            click.echo(f"{'':<16}→ {finding.remedy}")


def packages() -> Iterator[Finding]:
    """What is installed against the lock file of a checkout, else against what the package asks for."""
    wanted, source = (locked(LOCK), LOCK.name) if LOCK.is_file() else (asked_for(), f"what {OURS} asks for")
    missing, other = [], []
    for name, version in wanted.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if version and found.split("+")[0] != version.split("+")[0]:
            other.append(f"{name} {found} (lock: {version})")
    remedy = "`make setup` in the checkout, or pip install -U loopwright"
    needed = set(asked_for())
    if vital := [name for name in missing if name in needed]:
        yield Finding("packages", "fail", f"missing: {listed(vital)}", remedy)
    if rest := [name for name in missing if name not in needed]:
        yield Finding("packages", "warn", f"in {source} and not installed: {listed(rest)}", remedy)
    if other:
        yield Finding("packages", "warn", f"versions other than in {source}: {listed(other)}", remedy)
    if not missing and not other:
        yield Finding("packages", "ok", f"{len(wanted)} packages as in {source}")
    yield from torchvision()


def torchvision() -> Iterator[Finding]:
    """A build that does not match torch's breaks the import of every model."""
    builds = {}
    for name in ("torch", "torchvision"):
        try:
            builds[name] = importlib.metadata.version(name).partition("+")[2]
        except importlib.metadata.PackageNotFoundError:
            return
    if builds["torch"] != builds["torchvision"]:
        text = f"torchvision's build ({builds['torchvision'] or 'default'}) is not torch's ({builds['torch'] or 'default'})"
        yield Finding(
            "packages", "fail", f"{text}: models cannot be imported", "pip uninstall torchvision torchaudio torchcodec"
        )


def locked(path: Path) -> dict[str, str]:
    """Name → exact version of a lock file."""
    pins = (line.partition("#")[0].strip().partition("==") for line in path.read_text().splitlines())
    return {normal(name): version for name, equals, version in pins if equals}


def asked_for() -> dict[str, str]:
    """Names of the package's own dependencies, without extras."""
    try:
        lines = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {normal(re.split(r"[<>=!~;\[ (]", line, maxsplit=1)[0]): "" for line in lines if "extra ==" not in line}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def storage(uri: str | None = None) -> Iterator[Finding]:
    """The home, and where checkpoints go: to `uri`, or where LOOPWRIGHT_STORAGE__URI sends those of this machine's runs."""
    from infra.home import home

    yield checkup.folder(home(), "LOOPWRIGHT_HOME", "LOOPWRIGHT_HOME=…")
    yield from checkup.shared_memory()
    try:
        place = storage_of_machine(uri)
    except (ConfigErrors, ValidationError) as error:
        named = "LOOPWRIGHT_STORAGE__URI" if uri is None else "--storage"
        yield Finding("storage", "fail", f"{named}: {' '.join(str(error).split())}", f"write {named}=s3://bucket/prefix")
        return
    if place.remote:
        yield checkup.bucket(place.of_run(OURS))
    elif place.uri is not None:
        yield checkup.folder(place.folder(), "storage.uri", "LOOPWRIGHT_STORAGE__URI=…")


def storage_of_machine(uri: str | None) -> StorageConfig:
    """What a run would be given that names no storage in its config, or `uri`.

    Raises:
        ConfigErrors, ValidationError: it makes no sense.
    """
    merged: dict[str, Any] = {}
    for _, tree in file_layers("grpo", None):
        merged |= tree.get("storage", {})
    return StorageConfig.model_validate(merged | ({} if uri is None else {"uri": uri}))


def tracking(uri: str) -> Iterator[Finding]:
    """MLflow's store: the local file can be opened, or the server answers and lets this user in."""
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        yield local_tracking(uri)
        return
    if parts.scheme not in ("http", "https"):
        kind = f"{parts.scheme}:// address" if parts.scheme not in ("", "file") else "folder"
        remedy = "have an MLflow server serve it and set MLFLOW_TRACKING_URI=http://…, or write sqlite:////folder/mlflow.db"
        yield Finding("tracking", "fail", f"MLFLOW_TRACKING_URI is a {kind}: runs write to a server or an SQLite file", remedy)
        return
    shown = uri.replace(f"{parts.username}:{parts.password}@", "") if parts.password else uri
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    login: Any = (user, password or "") if user else None
    path = "/api/2.0/mlflow/experiments/search"
    try:
        answer = httpx.post(uri.rstrip("/") + path, json={"max_results": 1}, headers=headers, auth=login, timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "start it, or leave MLFLOW_TRACKING_URI unset; a run goes on without it and sends its metrics later"
        yield Finding("tracking", "fail", f"no MLflow server answers at {shown}: {type(error).__name__}", remedy)
        return
    if answer.status_code in (401, 403):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        yield Finding("tracking", "fail", f"MLflow at {shown} refuses this user ({answer.status_code})", remedy)
    elif answer.status_code != 200 or not answer.headers.get("content-type", "").startswith("application/json"):
        yield Finding("tracking", "fail", f"what answers at {shown} is not MLflow ({answer.status_code})", "check the address")
    else:
        yield Finding("tracking", "ok", f"MLflow answers at {shown}")


def local_tracking(uri: str) -> Finding:
    path = Path(uri.removeprefix("sqlite:///"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if not os.access(path.parent, os.W_OK):
                raise OSError(f"{path.parent} is not writable")
            return Finding("tracking", "ok", f"MLflow's store {path} is made by the first run")
        with sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=ANSWER_S) as connection:
            connection.execute("SELECT version_num FROM alembic_version").fetchone()
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except (OSError, sqlite3.Error) as error:
        remedy = "move the file away (a run makes a new one), or free its lock"
        return Finding("tracking", "fail", f"MLflow's store {path} cannot be used: {error}", remedy)
    return Finding("tracking", "ok", f"MLflow's store {path} opens")


def prefect() -> Iterator[Finding]:
    """The API that a run would use: the user's, that of `loopwright up`, or one started for the run."""
    from flows.connections import running

    url = os.environ.get("PREFECT_API_URL")
    up = running()
    if url is None and up is not None:
        url = up.prefect_url
    if url is None:
        found = importlib.metadata.version("prefect")
        yield Finding("Prefect", "ok", f"{found}; no API is up: each run starts its own (`loopwright up` keeps one)")
        return
    login = os.environ.get("PREFECT_API_AUTH_STRING")
    key = os.environ.get("PREFECT_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    auth: Any = tuple(login.split(":", 1)) if login and ":" in login else None
    try:
        answer = httpx.post(f"{url.rstrip('/')}/flows/count", json={}, headers=headers, auth=auth, timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "start it (`loopwright up`), or unset PREFECT_API_URL: a run then starts its own"
        yield Finding("Prefect", "fail", f"no API answers at {url}: {type(error).__name__}", remedy)
        return
    if answer.status_code in (401, 403):
        remedy = "set PREFECT_API_AUTH_STRING (user:password), or PREFECT_API_KEY"
        yield Finding("Prefect", "fail", f"the API at {url} refuses this user ({answer.status_code})", remedy)
    elif answer.status_code != 200:
        yield Finding("Prefect", "fail", f"what answers at {url} is no Prefect API ({answer.status_code})", "it ends in /api")
    else:
        yield Finding("Prefect", "ok", f"API at {url} answers")


def server(python: str | None) -> Iterator[Finding]:
    """A real server with a tiny model: a minute, on a GPU if there is one."""
    from flows.quickstart_task import build_model, build_tokenizer
    from infra.leases import LeaseManager
    from infra.registry import Registry
    from infra.vllm import Needs, ServerSpec, start_server

    with tempfile.TemporaryDirectory(prefix="loopwright-doctor-") as folder, LeaseManager(Registry()) as leases:
        model = Path(folder, "model")
        build_model(0).save_pretrained(model)
        build_tokenizer().save_pretrained(model)
        spec = ServerSpec(str(model), name="doctor", python=python)
        started = None
        try:
            gpu = leases.lease_gpus(1 if spec.resolved_device == "cuda" else 0)
            started = start_server(spec, leases.lease_port(), gpu.devices, log_path=Path(folder, "log"))
            started.wait_ready()
            started.require(Needs())
            yield Finding("server", "ok", f"vLLM {started.capabilities().version} started, generated and can be updated")
        except InfraError as error:
            tail = started.process.log_tail(15) if started is not None else ""
            yield Finding("server", "fail", f"{error}\n{tail}".strip(), "the lines above say why")
        finally:
            if started is not None:
                started.stop()
