"""`rollout_buffer.npz`: generated samples that no committed step has used, in order, as flat arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainers.errors import ConfigError
from trainers.types import Sample

FORMAT = 2
_PER_TOKEN = {"token_ids": np.int32, "loss_mask": bool, "sampler_logprobs": np.float32, "versions": np.int32}
# What only some objectives ask for: [rows] or [rows, width].
_OPTIONAL = ("top_ids", "top_logprobs", "candidate_ids", "candidate_counts", "teacher_logprobs")
_ABSENT = _FLAT = -1


def buffer_arrays(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Samples as arrays: per token concatenated, per sample stacked."""
    arrays = {
        "format": np.array(FORMAT),
        "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "keys": np.array([[int(part) for part in sample.group.split(":")] for sample in samples], np.int64).reshape(-1, 2),
        "advantages": np.array([sample.advantage for sample in samples], np.float64),
        "metrics": np.frombuffer(json.dumps([sample.metrics for sample in samples]).encode(), np.uint8),
    }
    for name, kind in _PER_TOKEN.items():
        arrays[name] = np.concatenate([np.zeros(0, kind), *(getattr(sample, name) for sample in samples)]).astype(kind)
    if any(sample.teacher is not None for sample in samples):
        arrays["teachers"] = np.frombuffer(json.dumps([sample.teacher for sample in samples]).encode(), np.uint8)
    for name in _OPTIONAL:
        arrays |= _pack_optional(name, [getattr(sample, name) for sample in samples])
    return arrays


def _pack_optional(name: str, values: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    """All samples' values end to end, and `<name>_shapes` [samples, 2]; nothing if no sample has any."""
    present = [value.reshape(-1) for value in values if value is not None]
    if not present:
        return {}
    shapes = [
        (_ABSENT, _ABSENT) if value is None else value.shape if value.ndim == 2 else (len(value), _FLAT) for value in values
    ]
    return {name: np.concatenate(present), f"{name}_shapes": np.array(shapes, np.int64)}


def _unpack_optional(name: str, arrays: Mapping[str, np.ndarray], count: int) -> list[np.ndarray | None]:
    if name not in arrays:
        return [None] * count
    flat, shapes = arrays[name], arrays[f"{name}_shapes"].tolist()
    values: list[np.ndarray | None] = []
    start = 0
    for rows, width in shapes:
        if rows == _ABSENT:
            values.append(None)
            continue
        stop = start + rows * (1 if width == _FLAT else width)
        values.append(flat[start:stop] if width == _FLAT else flat[start:stop].reshape(rows, width))
        start = stop
    return values


def write_buffer(file: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(file, "wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_buffer(file: Path) -> list[Sample]:
    """The samples of a buffer file, in order.

    Raises:
        ConfigError: it was written in another format.
    """
    with np.load(file, allow_pickle=False) as stored:
        found = int(stored["format"]) if "format" in stored else 1
        if found != FORMAT:
            raise ConfigError(
                f"{file} has format {found}, and this version reads format {FORMAT}: resume with the version that wrote it, or "
                "begin a new run from its model"
            )
        arrays = {name: stored[name] for name in stored.files}
    stops = np.cumsum(arrays["lengths"])[:-1]
    metrics = json.loads(arrays["metrics"].tobytes())
    fields: dict[str, Any] = {name: np.split(arrays[name], stops) for name in _PER_TOKEN}
    fields |= {name: _unpack_optional(name, arrays, len(metrics)) for name in _OPTIONAL}
    fields["teacher"] = json.loads(arrays["teachers"].tobytes()) if "teachers" in arrays else [None] * len(metrics)
    samples = []
    for i, (epoch, row) in enumerate(arrays["keys"].tolist()):
        own = {name: values[i] for name, values in fields.items()}
        trained = own["versions"][own["loss_mask"]]
        samples.append(
            Sample(
                group=f"{epoch}:{row}",
                advantage=float(arrays["advantages"][i]),
                version_min=int(trained.min()),
                metrics=metrics[i],
                **own,
            )
        )
    return samples
