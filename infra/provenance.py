"""What reproduces a run: the facts of machine, code, packages, model and data at one moment, and how two such moments differ.

    collect(config, …) ─▶ provenance.json in the run's folder (newest attempt), logs/provenance-<n>.json (attempt n)
                             ├─ note(…)     the trainer adds the dataset's fingerprint when it has read it
                             ├─▶ checkpoint-<step>/provenance.json, copied by the trainer
                             └─▶ MLflow, provenance/provenance-<n>.json

    differences(then, now) ─▶ one line each; those that make another experiment of it are `serious`

References in a config stay as written, what looks like a secret is removed, a diff of more than 256 KiB is cut.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.git_state import git_state, top_level
from infra.gpus import nvml
from infra.outbox import write_atomically
from infra.redaction import redact
from infra.storage.base import file_sha256
from infra.tracking_params import is_secret, without_secrets

FILE = "provenance.json"
FORMAT = 1
SAMPLES, SAMPLE_BYTES = 64, 65536
HASHED_WHOLE_BYTES = 256 << 20
_ENVIRONMENT = re.compile(r"^(CUDA|NVIDIA|NCCL|OMP|MKL|TORCH|PYTORCH|VLLM|HF|TRANSFORMERS|TOKENIZERS|PYTHON)_?[A-Z_]*$")
_CHECKOUT = Path(__file__).parent.parent


def collect(
    config: Mapping[str, Any],
    model: str,
    dataset: Mapping[str, Any],
    code: Iterable[Path] = (),
    servers: Mapping[str, list[str]] | None = None,
) -> dict[str, Any]:
    """The facts of this moment, JSON-ready.

    Args:
        config: the run config, references as written.
        model: folder or hub id, as the trainer loads it.
        dataset: `{"path", "split"}` of the training data.
        code: files of the user's that the config names (rewards, tools, …).
        servers: command lines of the run's servers.
    """
    files = sorted({file.absolute() for file in code if file.is_file()})
    return {
        "format": FORMAT,
        "created_at": time.time(),
        "config": without_secrets(dict(config)),
        "seed": config.get("seed"),
        "argv": [redact(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus(),
        "environment": {
            name: redact(value)
            for name, value in sorted(os.environ.items())
            if _ENVIRONMENT.match(name) and not is_secret(name)
        },
        "packages": packages(),
        "code": code_state([Path.cwd(), *(file.parent for file in files)]),
        "files": {str(file): file_digest(file) for file in files},
        "model": {"name": model, **model_state(model)},
        "dataset": {**dataset, **dataset_state(str(dataset["path"]))},
        "servers": {name: [redact(part) for part in command] for name, command in (servers or {}).items()},
    }


def write(folder: Path, attempt: int, facts: Mapping[str, Any]) -> None:
    """Store an attempt's facts in the run's folder."""
    text = json.dumps({**facts, "attempt": attempt}, indent=1, ensure_ascii=False).encode()
    for path in (attempt_file(folder, attempt), folder / FILE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def note(folder: Path, attempt: int, **dataset: Any) -> None:
    """Add to the facts about the dataset what only its reader knows."""
    facts = read(folder)
    if facts is not None and facts.get("attempt") == attempt:
        write(folder, attempt, {**facts, "dataset": {**facts["dataset"], **dataset}})


def attempt_file(folder: Path, attempt: int) -> Path:
    return folder / "logs" / f"provenance-{attempt}.json"


def read(folder: Path) -> dict[str, Any] | None:
    """The facts in a run's or a checkpoint's folder; None: there are none that can be read."""
    with suppress(OSError, ValueError):
        facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if isinstance(facts, dict) and facts.get("format") == FORMAT:
            return facts
    return None


def packages() -> dict[str, str]:
    """Name → version of every installed distribution; of one installed twice, the one that is imported."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return dict(sorted(found.items()))


def code_state(folders: Iterable[Path]) -> dict[str, Any]:
    """Git state of Loopwright, if it is a checkout, and of the checkouts that hold the user's folders, by top-level folder."""
    roots = dict.fromkeys(root for folder in (_CHECKOUT, *folders) if (root := top_level(folder)) is not None)
    return {str(root): git_state(root) for root in roots}


def gpus() -> list[str]:
    with suppress(Exception), nvml() as (library, devices):  # no library, no driver, no GPU
        driver = library.nvmlSystemGetDriverVersion()
        return [f"{library.nvmlDeviceGetName(device)} (driver {driver})" for device in devices]
    return []


def model_state(model: str) -> dict[str, Any]:
    """`digest` of a model folder's files, or the `revision` of a hub model that the cache holds."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        # What a resume or another model of the same folder adds is no part of it.
        return {"digest": _digest(folder, (path for path in folder.iterdir() if path.name not in (FILE, "manifest.json")))}
    with suppress(Exception):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return {"revision": Path(cached).parent.name}
    return {}


def dataset_state(path: str) -> dict[str, Any]:
    """`digest` of a dataset's file or folder, or the `revision` of one from the hub, as far as the cache tells."""
    place = Path(path).expanduser()
    if place.is_file():
        return {"digest": file_digest(place)}
    if place.is_dir():
        return {"digest": _digest(place, place.rglob("*"))}
    with suppress(Exception):
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            return {"revision": HfApi().dataset_info(path, timeout=10.0).sha}
    return {}


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    """Of the files among `paths`, by their names below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()[:32]


def file_digest(path: Path) -> str:
    """SHA-256 (32 hex digits) of a file; beyond 256 MiB of its size and 64 pieces at even distances, which no training of a
    model leaves as they were, and which takes no minutes."""
    size = path.stat().st_size
    if size <= HASHED_WHOLE_BYTES:
        return file_sha256(path)[:32]
    digest = hashlib.sha256(f"sampled {size}\n".encode())
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Difference:
    """`serious`: it is another experiment (data, model); else the same one in other circumstances."""

    what: str
    then: Any
    now: Any
    serious: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {_shown(self.then)} → {_shown(self.now)}"


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What differs between two moments, the serious things first; what one of them does not know is no difference."""
    found = [*_data(then, now), *_circumstances(then, now)]
    return sorted(found, key=lambda difference: not difference.serious)


def _data(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    # The rows count, not the file: the same rows in another file are the same data.
    old, new = then.get("dataset", {}), now.get("dataset", {})
    key = next((key for key in ("fingerprint", "digest", "revision") if old.get(key) and new.get(key)), None)
    if key is not None and old[key] != new[key]:
        yield Difference(f"dataset {old.get('path')} ({key})", old[key], new[key], serious=True)
    old, new = then.get("model", {}), now.get("model", {})
    for key in ("digest", "revision"):
        if old.get(key) and new.get(key) and old[key] != new[key]:
            yield Difference(f"model {old.get('name')} ({key})", old[key], new[key], serious=True)


def _circumstances(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for key in ("python", "platform", "gpus"):
        if key in then and then[key] != now.get(key):
            yield Difference(key, then[key], now.get(key))
    for section, what in (("files", "file"), ("packages", "package"), ("environment", "variable")):
        old, new = then.get(section, {}), now.get(section, {})
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield Difference(f"{what} {name}", old.get(name), new.get(name))
    old, new = then.get("code", {}), now.get("code", {})
    for folder in sorted({*old, *new}):
        left, right = old.get(folder) or {}, new.get(folder) or {}
        if left.get("commit") != right.get("commit"):
            yield Difference(f"code {folder} (commit)", left.get("commit"), right.get("commit"))
        if left.get("diff_digest") != right.get("diff_digest"):
            yield Difference(f"code {folder} (uncommitted changes)", left.get("diff_digest"), right.get("diff_digest"))


def _shown(value: Any) -> str:
    text = "none" if value in (None, [], "") else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
