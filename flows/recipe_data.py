"""The prompts of the merging stage: those of all domains in one file, each with the name of the teacher that scores it.

    domain's rows ─▶ prompt, system message included ─┐
    domain's rows ─▶ …                                ┼─▶ evenly mixed ─▶ {"prompt": …, "teacher_id": domain} ─▶ rename

The same data sets give the same file, byte by byte: a resume makes it anew where it is gone, and finds the same fingerprint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.registry import config_hash
from trainers.config_parts import DatasetConfig
from trainers.errors import DatasetError
from trainers.references import resolve

TEACHER_COLUMN = "teacher_id"
JOINED = "prompts:joined"  # a stage of the recipe that is no run; no domain can be called so


def join(datasets: Mapping[str, DatasetConfig], path: Path) -> dict[str, Any]:
    """Write the file; `{"path", "fingerprint", "rows": {domain: count}}`. It appears whole, by rename.

    A domain's rows are spread over the file, so that each part of it has every domain in about its share of the whole.

    Raises:
        DatasetError: one of them cannot be read, or lacks its prompt column.
    """
    from trainers.data import load_rows

    prompts = {name: list(_prompts(name, dataset)) for name, dataset in datasets.items()}
    places = sorted(
        ((index + 0.5) / len(rows), order, index) for order, rows in enumerate(prompts.values()) for index in range(len(rows))
    )
    names = list(prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for _, order, index in places:
                row = {"prompt": prompts[names[order]][index], TEACHER_COLUMN: names[order]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fingerprint = load_rows(DatasetConfig.model_validate({"path": str(path)})).fingerprint()
    return {"path": str(path), "fingerprint": fingerprint, "rows": {name: len(rows) for name, rows in prompts.items()}}


def joined_from(datasets: Mapping[str, DatasetConfig]) -> str:
    """Hash of what `join` is told: equal for data sets that are named and cut alike, whatever their files hold."""
    told = [[name, dataset.model_dump(mode="json", exclude_defaults=True)] for name, dataset in datasets.items()]
    return config_hash({"domains": told})


def _prompts(name: str, dataset: DatasetConfig) -> Iterator[str | list[dict[str, Any]]]:
    from trainers.data import load_rows

    rows = load_rows(DatasetConfig.model_validate(resolve(dataset.model_dump())))
    rows.require(dataset.prompt_column)
    for index in range(len(rows)):
        prompt = rows[index][dataset.prompt_column]
        if dataset.system_prompt is not None:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            prompt = [{"role": "system", "content": dataset.system_prompt}, *asked]
        if not isinstance(prompt, str | list) or not prompt:
            raise DatasetError(f"domain {name}, row {index}: its prompt is {prompt!r:.80}, neither text nor chat messages")
        yield prompt
