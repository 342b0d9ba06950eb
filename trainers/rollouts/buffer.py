"""`rollout_buffer.npz`: generated samples that no committed step has used, in order, as flat arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainers.types import Sample


def buffer_arrays(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Samples as arrays: per token concatenated, per sample stacked."""
    empty = np.zeros(0, np.int32)
    return {
        "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "keys": np.array([[int(part) for part in sample.group.split(":")] for sample in samples], np.int64).reshape(-1, 2),
        "advantages": np.array([sample.advantage for sample in samples], np.float64),
        "token_ids": np.concatenate([empty, *(sample.token_ids for sample in samples)]).astype(np.int32),
        "loss_mask": np.concatenate([empty, *(sample.loss_mask for sample in samples)]).astype(bool),
        "sampler_logprobs": np.concatenate([empty, *(sample.sampler_logprobs for sample in samples)]).astype(np.float32),
        "versions": np.concatenate([empty, *(sample.versions for sample in samples)]).astype(np.int32),
        "metrics": np.frombuffer(json.dumps([sample.metrics for sample in samples]).encode(), np.uint8),
    }


def write_buffer(file: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(file, "wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_buffer(file: Path) -> list[Sample]:
    """The samples of a buffer file, in order."""
    with np.load(file, allow_pickle=False) as arrays:
        stops = np.cumsum(arrays["lengths"])[:-1]
        per_token = [np.split(arrays[name], stops) for name in ("token_ids", "loss_mask", "sampler_logprobs", "versions")]
        metrics = json.loads(arrays["metrics"].tobytes())
        return [
            Sample(
                group=f"{epoch}:{row}",
                token_ids=token_ids,
                loss_mask=loss_mask,
                sampler_logprobs=logprobs,
                advantage=float(advantage),
                version_min=int(versions[loss_mask].min()),
                version_max=int(versions[loss_mask].max()),
                versions=versions,
                metrics=values,
            )
            for (epoch, row), advantage, token_ids, loss_mask, logprobs, versions, values in zip(
                arrays["keys"].tolist(), arrays["advantages"], *per_token, metrics, strict=False
            )
        ]
