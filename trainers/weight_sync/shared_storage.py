"""Weights to the servers through a file both sides can read (`/dev/shm` where it is large enough).

    every rank: gather parameters in one order ─▶ rank 0: one safetensors file in the server's type
    rank 0:     pause (keep) ─▶ start ─▶ update {path} ─▶ finish {version} ─▶ resume ─▶ version and probe checked

Invariants:
- the file is whole before the server is paused, so the pause lasts as long as the server's load;
- the server is resumed whatever happened after the pause; a failed cycle is tried once more, then the sync fails;
- no rank is in a collective while rank 0 is in a call: ranks meet before the calls, and learn how they went after.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from trainers.config import AsyncTrainerConfig
from trainers.distributed import Ranks
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.model import Policy, compute_dtype, export_state, gathered_parameters, probe_logprobs
from trainers.server import BACKEND, ServerClient, ServerFacts

logger = logging.getLogger(__name__)
PREFIX = "loopwright-weights-"
PROBE_TEXT = "Question: what is 17 + 25? Answer: 17 + 25 = 42. The quick brown fox jumps over the lazy dog."
PROBE_TOKENS = 48
# Mean absolute difference in nats. A wrong set of weights is off by several; rounding in bfloat16 by a few hundredths.
PROBE_TOLERANCE = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.15, "float16": 0.15}


def probe_tokens(tokenizer: Any, vocabulary: int) -> np.ndarray:
    """int32, at most `PROBE_TOKENS`: ordinary text, or ids over all the vocabulary where the tokenizer makes nothing of it."""
    ids = [] if tokenizer is None else tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    ids = [token for token in ids if token < vocabulary][:PROBE_TOKENS]
    if len(set(ids)) < 8:
        ids = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS).tolist()
    return np.array(ids, np.int32)


def sweep(base: Path) -> None:
    """Remove weight folders whose process was killed: in `/dev/shm` they hold memory. Those of the last minute stay."""
    for folder in base.glob(PREFIX + "*"):
        try:
            if time.time() - folder.stat().st_mtime < 60:
                continue
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


class SharedStorageSync:
    """`WeightSync` for one server. Construct it on every rank; only rank 0 talks to the server."""

    def __init__(
        self, config: AsyncTrainerConfig, ranks: Ranks, tokenizer: Any = None, client: ServerClient | None = None
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.client = client or ServerClient(config.vllm_server_base_url, config.vllm_server_timeout)
        self.facts: ServerFacts | None = None
        self.dtype = "float32"  # what the trainer computes in, known once connected
        self.directory: Path | None = None
        self._lock = -1  # open descriptor of the folder, while there is one
        self.pushes = 0

    def push(self, policy: Policy, version: int) -> dict[str, float]:
        """See `WeightSync.push`; compares a probe's logprobs at the first push and every `weight_check_steps` pushes."""
        began = time.perf_counter()
        if self.facts is None:
            self.facts = self.ranks.rank_zero(lambda: self._connect(policy))
        facts = self.facts
        self.ranks.barrier()
        waited = time.perf_counter() - began
        every = self.config.weight_check_steps
        checks = every > 0 and self.pushes % every == 0
        # On every rank before any call: the forward of sharded parameters is a collective.
        tokens = probe_tokens(self.tokenizer, policy.model.config.get_text_config().vocab_size)[: facts.max_model_len - 1]
        expected = probe_logprobs(policy, tokens, self.ranks.device) if checks else None
        dtype = getattr(torch, facts.dtype)
        state = dict(gathered_parameters(policy.model, dtype, keep=self.ranks.is_main))
        metrics = self.ranks.rank_zero(lambda: self._send(policy, state, version, tokens, expected))
        self.pushes += 1
        return {
            **metrics,
            "perf/weight_sync_barrier_s": waited,
            "perf/weight_sync_s": time.perf_counter() - began,
        }

    def close(self) -> None:
        """Remove the folder the files were written to."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self.directory = None

    # Rank 0 ----------------------------------------------------------------------------------------------------------

    def _connect(self, policy: Policy) -> ServerFacts:
        self.client.wait_healthy()
        facts = self.client.facts()
        if facts.weight_backend != BACKEND:
            raise ServerCapabilityError(
                f"{self.client.url} was started with weight transfer {facts.weight_backend!r}; this run needs the flag "
                f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\' (`loopwright serve MODEL` sets it)'
            )
        ours = self.dtype = str(compute_dtype(self.config, self.ranks.device) or policy.model.dtype).removeprefix("torch.")
        if ours != facts.dtype:
            logger.warning(
                "the trainer computes in %s, the server in %s: serve with --dtype %s to have them agree",
                ours,
                facts.dtype,
                ours,
            )
        # A trainer that died in mid-sync may have left the server paused.
        self.client.resume()
        return facts

    def _folder(self, needed: int) -> Path:
        """A private folder with room for `needed` bytes twice; made at the first push."""
        if self.directory is None:
            allowed = os.environ.get("LOOPWRIGHT_WEIGHT_DIRS", "").split(os.pathsep)[0]
            fallback = Path(self.config.output_dir)
            base = Path(allowed) if allowed else Path("/dev/shm")
            if not allowed and not (base.is_dir() and os.access(base, os.W_OK) and shutil.disk_usage(base).free > 2 * needed):
                base = fallback
            base.mkdir(parents=True, exist_ok=True)
            sweep(base)
            self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base.resolve()))
            # Held until this process ends, however it ends: a folder that can be locked has no owner.
            self._lock = os.open(self.directory, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.client.init_weight_transfer(str(self.directory))
        return self.directory

    def _send(
        self, policy: Policy, state: dict[str, torch.Tensor], version: int, tokens: np.ndarray, expected: np.ndarray | None
    ) -> dict[str, float]:
        began = time.perf_counter()
        state = export_state(policy.model, state)
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        try:
            path = self._folder(size) / f"policy-{version}.safetensors"
            save_file(state, path)
        except ServerError as error:
            raise WeightSyncError(f"the server cannot read the weight folder: {error}") from error
        except OSError as error:
            raise WeightSyncError(f"weights of version {version} could not be written: {error}") from error
        written = time.perf_counter() - began
        try:
            paused, loaded = self._cycle_with_retry(path, version)
        finally:
            path.unlink(missing_ok=True)
        metrics = {
            "perf/weight_sync_pause_s": paused,
            "perf/weight_sync_transfer_s": written + loaded,
            "perf/weight_sync_bytes": float(size),
        }
        try:
            return metrics | self._verify(version, tokens, expected)
        except WeightSyncError:
            raise
        except ServerError as error:
            raise WeightSyncError(f"version {version} could not be checked: {error}") from error

    def _cycle_with_retry(self, path: Path, version: int) -> tuple[float, float]:
        first = ""
        for attempt in (1, 2):
            try:
                return self._cycle(path, version)
            except ServerError as error:
                if attempt == 2:
                    raise WeightSyncError(f"{self.client.url} did not take policy version {version}, twice: {error}") from error
                first = str(error)
                logger.warning("weight sync to version %d failed, trying once more: %s", version, first)
        raise AssertionError("unreachable: the loop returns or raises")

    def _cycle(self, path: Path, version: int) -> tuple[float, float]:
        """Seconds of the pause call and of start to finish. The server is resumed on every way out."""
        began = time.perf_counter()
        try:
            self.client.pause()
            paused = time.perf_counter() - began
            self.client.start_update()
            self.client.update(str(path))
            self.client.finish_update(version)
            loaded = time.perf_counter() - began - paused
        finally:
            self._resume()
        return paused, loaded

    def _resume(self) -> None:
        """Tries a few times: a server left paused would serve nobody."""
        for left in (2, 1, 0):
            try:
                self.client.resume()
                return
            except ServerError as error:
                if not left:
                    raise
                logger.warning("resuming the server failed, trying again: %s", error)
                time.sleep(1.0)

    def _verify(self, version: int, tokens: np.ndarray, expected: np.ndarray | None) -> dict[str, float]:
        served = self.client.weight_version()
        if served != str(version):
            raise WeightSyncError(f"{self.client.url} says it serves version {served!r} after a sync to {version}")
        if expected is None:
            return {}
        difference = np.abs(self.client.prompt_logprobs(tokens, version) - expected)
        assert self.facts is not None, "checked before the connection was made"
        tolerance = max(PROBE_TOLERANCE[self.facts.dtype], PROBE_TOLERANCE[self.dtype])
        if not difference.mean() <= tolerance:
            raise WeightSyncError(
                f"after the sync to version {version} the server's log-probabilities differ from the trainer's by "
                f"{difference.mean():.4g} nats on average (largest {difference.max():.4g}, tolerance {tolerance:g}): it serves "
                "other weights, another dtype or another model than the trainer holds"
            )
        return {"perf/weight_probe_abs_diff": float(difference.max())}
