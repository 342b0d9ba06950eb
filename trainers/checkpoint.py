"""Checkpoints: whole or absent, resumable on another number of ranks.

    <output_dir>/checkpoint-<step>/
        config.json, model.safetensors, tokenizer …   what transformers and vLLM load; with `peft` instead
        adapter_config.json, adapter_model.safetensors the adapter alone, what peft loads (`trainers.export` merges it)
        resume/                                        master weights and optimizer, torch.distributed.checkpoint; of an
                                                       adapter's run the adapter's, as the base never changes
        rng/rank-<r>.pt, scheduler.pt                  generators of each rank, schedule
        trainer_state.json, loop_state.json            transformers' TrainerState; version, totals, clocks
        rollout_state.json, rollout_buffer.npz         the rollout ledger, written by the step source
        loopwright_config.json                         the resolved trainer config
        provenance.json                                what reproduces the run, if the run's folder has it: code, packages, data
        manifest.json                                  written last: files, sizes, SHA-256, step, config hash, what was measured
        PINNED                                         made by hand (`loopwright checkpoints pin`): retention leaves it alone

Everything is written into `.tmp-checkpoint-<step>`, flushed to disk and renamed. A reader takes the newest folder whose
manifest holds; a save that fails leaves the older checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import TrainerState

from trainers import lora
from trainers.config import TrainerConfig
from trainers.distributed import Ranks
from trainers.errors import CheckpointError
from trainers.model import Policy, compute_dtype, gathered_parameters, save_hf
from trainers.retention import Retention

logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"
CONFIG = "loopwright_config.json"
PROVENANCE = "provenance.json"
PREFIX = "checkpoint-"
PINNED = "PINNED"


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of a stored config as canonical JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(directory: Path, step: int, digest: str, metrics: Mapping[str, float] | None = None) -> None:
    """Flush every file of `directory` to disk, then write its manifest.

    Args:
        metrics: what was measured of this step; retention and whoever chooses a checkpoint go by it.
    """
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        _fsync(path)
        files[str(path.relative_to(directory))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    measured = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
    manifest = {"format": 1, "step": step, "config_sha256": digest, "metrics": measured, "files": files}
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _fsync(path)
    for folder in (p for p in directory.rglob("*") if p.is_dir()):
        _fsync(folder)
    _fsync(directory)


def fault(directory: Path) -> str | None:
    """What keeps a checkpoint from being whole; None if every file has the size and SHA-256 its manifest states."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = manifest["files"].items()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    for name, entry in files:
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
        try:
            digest = _sha256(path)
        except OSError as error:  # a bad sector, no permission: an older checkpoint may still be readable
            return f"{name} cannot be read ({error.strerror})"
        if digest != entry["sha256"]:
            return f"{name} differs from its SHA-256"
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint as `Retention` looks at it."""

    pinned: bool
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Found:
        metrics: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            metrics = json.loads((directory / MANIFEST).read_text()).get("metrics", {})
        return cls((directory / PINNED).exists(), metrics)


def checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, oldest first, whole or not."""
    found = []
    for path in Path(output_dir).glob(PREFIX + "*"):
        with contextlib.suppress(ValueError):
            found.append((int(path.name[len(PREFIX) :]), path))
    return sorted(found)


def remove(directory: Path) -> None:
    """Delete a checkpoint, its manifest first: what a kill leaves of it does not look whole."""
    with contextlib.suppress(OSError):
        (directory / MANIFEST).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def latest_whole(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint; warns about each newer one that is not."""
    for _, path in reversed(checkpoints(output_dir)):
        why = fault(path)
        if why is None:
            return path
        logger.warning("checkpoint %s is not whole (%s): falling back to an older one", path, why)
    return None


def _rng_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}  # type: ignore[union-attr]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Checkpointer:
    """Saves and restores the loop's state. `save` and `restore` are called by every rank."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        tokenizer: Any = None,
        stored_config: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.policy = policy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.stored_config = stored_config or config.model_dump(mode="json")
        self.output_dir = Path(config.output_dir)
        self.retention = Retention(config.save_total_limit)
        # Called on rank 0 with the step just written; storage of another kind puts its own in its place.
        self.retain: Callable[[int], None] = self._retain
        self.last_bytes = 0

    def _resume_state(self) -> dict[str, Any]:
        options = StateDictOptions(ignore_frozen_params=lora.is_attached(self.policy.model))
        return {
            "model": get_model_state_dict(self.policy, options=options),
            "optimizer": get_optimizer_state_dict(self.policy, self.optimizer),
        }

    def _dcp(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        group = {"no_dist": True} if self.ranks.control is None else {"process_group": self.ranks.control}
        with warnings.catch_warnings():
            # It warns that a single process is a single process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            try:
                work(*args, **kwargs, **group)
            except CheckpointException as error:  # not an `Exception`; raised on every rank
                rank, (first, _) = next(iter(error.failures.items()))
                raise CheckpointError(f"rank {rank}: {type(first).__name__}: {first}") from error

    def _check_space(self) -> None:
        """Parameters and two optimizer moments at most 4 bytes each, the exported model, and a tenth to spare."""
        adapter = lora.is_attached(self.policy.model)
        saved = sum(p.numel() for p in self.policy.parameters() if p.requires_grad or not adapter)
        needed = max(self.last_bytes, 16 * saved) * 11 // 10
        free = shutil.disk_usage(self.output_dir).free
        if free < needed:
            raise CheckpointError(f"{self.output_dir} has {free:,} bytes free, a checkpoint needs about {needed:,}")

    def save(
        self,
        state: TrainerState,
        loop_state: dict[str, Any],
        snapshot: Callable[[Path], Any],
        metrics: Mapping[str, float] | None = None,
    ) -> Path | None:
        """Write the checkpoint of `state.global_step`; None, after a loud warning, if that failed on any rank.

        Args:
            loop_state: JSON of what the loop keeps (version, totals, clocks).
            snapshot: called on rank 0 with the unfinished folder, writes the rollout state into it.
            metrics: what was measured of this step, for the manifest.
        """
        step = state.global_step
        final = self.output_dir / f"{PREFIX}{step}"
        temporary = self.output_dir / f".tmp-{PREFIX}{step}"
        try:
            self.ranks.rank_zero(lambda: self._begin(temporary))
            self._guarded(lambda: self._write_shared(temporary))
            self.export(temporary)
            self.ranks.rank_zero(lambda: self._finish(temporary, final, state, loop_state, snapshot, metrics))
        except Exception as error:
            logger.warning("SAVING STEP %d FAILED, the last good checkpoint stays: %s: %s", step, type(error).__name__, error)
            if self.ranks.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            return None
        return final

    def _guarded(self, work: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as caught:
            error = caught
        self.ranks.agree(error)

    def _begin(self, temporary: Path) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for leftover in self.output_dir.glob(f".tmp-{PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._check_space()
        (temporary / "rng").mkdir(parents=True)

    def _write_shared(self, temporary: Path) -> None:
        self._dcp(dcp_save, self._resume_state(), checkpoint_id=temporary / "resume")
        torch.save(_rng_state(), temporary / "rng" / f"rank-{self.ranks.rank}.pt")

    def export(self, directory: Path, *, merged: bool = False) -> None:
        """Write config and weights as `from_pretrained` reads them, or the adapter as peft reads it; called by every rank.

        Args:
            merged: a whole model, the adapter merged in.
        """
        model = self.policy.model
        if lora.is_attached(model) and not merged:
            state = lora.adapter_state(model, keep=self.ranks.is_main)
            self.ranks.rank_zero(lambda: lora.save_adapter(model, state, directory))
            return
        dtype = compute_dtype(self.config, self.ranks.device) or model.dtype
        whole = dict(gathered_parameters(model, dtype, keep=self.ranks.is_main))
        if self.ranks.is_main:
            persistent = model.state_dict().keys()
            whole |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
        self.ranks.rank_zero(lambda: save_hf(model, whole, directory, dtype))

    def _finish(
        self, temporary: Path, final: Path, state: TrainerState, loop_state: dict[str, Any], snapshot: Any, metrics: Any
    ) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(temporary)
        torch.save(self.scheduler.state_dict(), temporary / "scheduler.pt")
        state.save_to_json(str(temporary / "trainer_state.json"))
        (temporary / "loop_state.json").write_text(json.dumps(loop_state, indent=1))
        (temporary / CONFIG).write_text(json.dumps(self.stored_config, indent=1))
        with contextlib.suppress(FileNotFoundError):  # a script without a flow has none
            shutil.copyfile(self.output_dir / PROVENANCE, temporary / PROVENANCE)
        snapshot(temporary)
        write_manifest(temporary, state.global_step, config_hash(self.stored_config), metrics)
        self.last_bytes = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
        pinned = (final / PINNED).exists()
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        if pinned:
            (final / PINNED).touch()
        _fsync(self.output_dir)
        self.retain(state.global_step)

    def _retain(self, newest: int) -> None:
        there = dict(checkpoints(self.output_dir))
        for step in self.retention.removable({step: Found.read(path) for step, path in there.items()}, newest):
            remove(there[step])

    def restore(self, directory: Path) -> tuple[TrainerState, dict[str, Any]]:
        """Load weights, optimizer, schedule and generators from a whole checkpoint; the number of ranks may have changed.

        Raises:
            CheckpointError: the checkpoint does not fit this model or optimizer.
        """
        state = self._resume_state()
        try:
            self._dcp(dcp_load, state, checkpoint_id=directory / "resume")
        except Exception as error:
            raise CheckpointError(f"{directory} does not fit this run's model and optimizer: {error}") from error
        # The model's tensors were loaded in place; the optimizer's may be fresh ones.
        set_optimizer_state_dict(self.policy, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(torch.load(directory / "scheduler.pt", weights_only=True))
        rng = directory / "rng" / f"rank-{self.ranks.rank}.pt"
        if rng.is_file():
            _set_rng_state(torch.load(rng, weights_only=True))
        return (
            TrainerState.load_from_json(str(directory / "trainer_state.json")),
            json.loads((directory / "loop_state.json").read_text()),
        )
