"""What of this machine a run leans on, looked at one thing after another: GPUs, vLLM, ports, storage, the registry.

Each check yields findings: ok, warn (a run goes on, with less) or fail (no run goes), each with what to do about it. A check
takes a second at most and starts nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import socket
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.errors import InfraError, StorageError, StorageRefused
from infra.gpus import NoDriver, nvml
from infra.leases import PORTS
from infra.storage.run_storage import RunStorage
from infra.vllm_command import PLUGIN
from infra.vllm_features import Features, installed

Status = Literal["ok", "warn", "fail"]
GIB = 1 << 30
HOME_WARN_GIB, HOME_FAIL_GIB = 10.0, 1.0
SHM_WARN_GIB = 2.0
PORTS_LOOKED_AT = 40
DATABASE_WAIT_S = 5.0
ACTIONS = "s3:PutObject, s3:GetObject, s3:DeleteObject, s3:ListBucket, s3:ListBucketMultipartUploads, s3:AbortMultipartUpload"
TRIED = ((0, 26), (0, 32))  # first and last version of vLLM that this was run with


@dataclass(frozen=True)
class Finding:
    area: str
    status: Status
    text: str
    remedy: str = ""


def gpus() -> Iterator[Finding]:
    try:
        with nvml() as (library, devices):
            for index, device in enumerate(devices):
                memory = library.nvmlDeviceGetMemoryInfo(device)
                total, used = float(memory.total) / GIB, float(memory.used) / GIB
                text = f"{index}: {library.nvmlDeviceGetName(device)}, {total:.0f} GiB, {used:.1f} used"
                busy = used > 0.1 * total
                remedy = "see whose it is with `nvidia-smi`; what dead runs left behind goes with `loopwright reap`"
                yield Finding("GPU", "warn" if busy else "ok", text, remedy if busy else "")
    except ImportError:
        yield Finding("GPU", "warn", "nvidia-ml-py is not installed, so no GPU is seen", "pip install nvidia-ml-py")
    except NoDriver as error:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            yield Finding("GPU", "fail", f"there are GPUs, but no driver answers: {error}", "mend the driver (`nvidia-smi`)")
        else:
            yield Finding("GPU", "ok", "none: runs compute on the CPU")


def vllm(python: str | None, gpus_seen: bool) -> Iterator[Finding]:
    try:
        found = installed(python)
    except InfraError as error:
        yield Finding("vLLM", "fail", str(error), "pip install 'loopwright[cpu]', or 'loopwright[gpu]' on a GPU machine")
        return
    yield version(found)
    yield build(found, gpus_seen)
    yield from capabilities(found, gpus_seen)
    yield plugin()


def version(found: Features) -> Finding:
    numbers = tuple(int(part) for part in found.version.split(".")[:2] if part.isdecimal())
    (low, high), text = TRIED, f"{found.version} in {found.folder}"
    span = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    if len(numbers) < 2 or not low <= numbers:
        return Finding("vLLM", "fail", f"{text} is too old", f"install a version from {span}")
    if numbers > high:
        return Finding("vLLM", "warn", f"{text} is newer than any that was tried", f"versions tried: {span}")
    return Finding("vLLM", "ok", text)


def build(found: Features, gpus_seen: bool) -> Finding:
    if gpus_seen and found.build == "cpu":
        return Finding(
            "vLLM", "fail", "the build is for CPUs, and there are GPUs", "pip install 'loopwright[gpu]' in its place"
        )
    if not gpus_seen and found.build in ("cuda", "rocm"):
        return Finding("vLLM", "fail", f"the build is for {found.build}, and no GPU is seen", "pip install 'loopwright[cpu]'")
    return Finding("vLLM", "ok", f"build for {found.build}")


def capabilities(found: Features, gpus_seen: bool) -> Iterator[Finding]:
    if not found.takes("weight_transfer_config"):
        yield Finding("vLLM", "fail", "it has no weight transfer, so no policy can be sent to it", "install 0.26 or newer")
    scale_out = "by --enable-scale-out" if found.takes("enable_scale_out") else "always"
    yield Finding("vLLM", "ok", f"/inference/v1/generate: {scale_out}")
    if found.takes("enable_lora"):
        yield Finding("vLLM", "ok", "adapters (LoRA): served")
    else:
        yield Finding(
            "vLLM", "warn", "adapters (LoRA): it cannot serve any", "use weight_sync other than lora, or a newer vLLM"
        )
    if not gpus_seen:
        yield Finding("vLLM", "ok", "Rust front end and candidate sets: on GPUs only")
        return
    rust = f"{found.rust}, used where it is asked for" if found.rust else "not in this build, and needed by nothing"
    yield Finding("vLLM", "ok", f"Rust front end: {rust}")
    if found.takes("return_sampling_mask"):
        yield Finding("vLLM", "ok", "candidate sets (--return-sampling-mask): returned")
    else:
        remedy = "keep top_p=1, top_k=0 and min_p unset, or install a newer vLLM"
        yield Finding("vLLM", "warn", "candidate sets: not in this version, so restricted sampling is biased", remedy)


def plugin() -> Finding:
    """vLLM finds the entry point through the folder that is put on its PYTHONPATH."""
    found = importlib.metadata.distributions(path=[str(PLUGIN)])
    points = [point for each in found for point in each.entry_points if point.group == "vllm.general_plugins"]
    if any(point.name == "loopwright" for point in points) and (PLUGIN / "loopwright_vllm" / "__init__.py").is_file():
        return Finding("vLLM", "ok", f"plugin: {PLUGIN}")
    return Finding("vLLM", "fail", f"plugin: not in {PLUGIN}", "install loopwright again: its files are not all there")


def ports() -> Iterator[Finding]:
    looked_at = random.Random(os.getpid()).sample(PORTS, PORTS_LOOKED_AT)
    free = sum(map(port_is_free, looked_at))
    text = f"{free} of {PORTS_LOOKED_AT} looked at between {PORTS.start} and {PORTS.stop} are free on loopback"
    remedy = "stop what listens there (`ss -ltnp`), or `loopwright reap` if dead runs left it"
    few = 2 * free < PORTS_LOOKED_AT
    yield Finding("ports", "fail" if not free else "warn" if few else "ok", text, remedy if few else "")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def folder(path: Path, name: str, remedy: str) -> Finding:
    """It takes files and renames them; how much room there is. `remedy`: how another one is named."""
    probe = path / f".loopwright-doctor-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
        probe.replace(probe.with_suffix(".moved"))
        probe.with_suffix(".moved").unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        return Finding("storage", "fail", f"{name} {path} cannot be written: {error.strerror}", f"name another: {remedy}")
    free = shutil.disk_usage(path).free / GIB
    status = "fail" if free < HOME_FAIL_GIB else "warn" if free < HOME_WARN_GIB else "ok"
    remedy = "" if status == "ok" else f"make room, or name a folder on a larger disk: {remedy}"
    return Finding("storage", status, f"{name} {path}: writable, {free:.1f} GiB free", remedy)


def bucket(place: RunStorage) -> Finding:
    """Its bucket is there and lets this user store, list, read and delete an object, which then is gone again."""
    try:
        place.quick_check()
    except StorageRefused as error:
        remedy = f"the user needs {ACTIONS} on the bucket; another service is named by AWS_ENDPOINT_URL_S3"
        return Finding("storage", "fail", f"storage.uri {place.uri}: {error}", remedy)
    except StorageError as error:
        remedy = "start the service, or set AWS_ENDPOINT_URL_S3 (storage.endpoint_url in a config) to where it is"
        return Finding("storage", "fail", f"storage.uri {place.uri}: {error}", remedy)
    return Finding("storage", "ok", f"storage.uri {place.uri}: an object was stored, listed, read and deleted")


def shared_memory(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Weights of CPU servers travel through it."""
    if shm.is_dir():
        size = shutil.disk_usage(shm).total / GIB
        small = size < SHM_WARN_GIB
        remedy = "in a container: --shm-size=8g" if small else ""
        yield Finding("storage", "warn" if small else "ok", f"{shm}: {size:.1f} GiB", remedy)


def database(url: str) -> Iterator[Finding]:
    """The registry opens, and takes a lock for writing. `url`: SQLAlchemy's, an SQLite file's or a server's."""
    from sqlalchemy import text
    from sqlalchemy.exc import SQLAlchemyError

    from infra.registry import Registry
    from infra.registry_engine import WRITES, open_engine

    shown, in_file = url.split("@")[-1].partition("?")[0], url.startswith("sqlite")
    try:
        # The real thing waits for a minute or more; a doctor does not.
        if not in_file:
            url = impatient(url)
        else:
            with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=DATABASE_WAIT_S) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.rollback()
        Registry(url)
        engine = open_engine(url).execution_options(**{WRITES: True})
        with engine.begin() as connection:
            connection.execute(text("SELECT 1"))
        engine.dispose()
    except (InfraError, SQLAlchemyError, sqlite3.Error, OSError) as error:
        cause = str(getattr(error, "orig", error)).splitlines()[0]
        if not in_file:
            remedy = "start the database, or correct LOOPWRIGHT_REGISTRY_URL=postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        elif "locked" in cause:
            remedy = "a process that holds the lock must end first (`fuser` names it)"
        else:
            remedy = "mend or move the file away, or put LOOPWRIGHT_HOME on a local disk"
        yield Finding("database", "fail", f"registry {shown}: {cause}", remedy)
        return
    yield Finding("database", "ok", f"registry {shown} opens and takes a write lock")


def impatient(url: str) -> str:
    """A database server's URL with a time limit for connecting, unless it has one."""
    from sqlalchemy.engine import make_url

    parts = make_url(url)
    limit = {} if "connect_timeout" in parts.query else {"connect_timeout": f"{DATABASE_WAIT_S:.0f}"}
    return parts.update_query_dict(limit).render_as_string(hide_password=False)
