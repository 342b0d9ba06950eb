"""Weights to the servers through a file both sides can read (`/dev/shm` where it is large enough).

    every rank: gather parameters in one order ─▶ rank 0: one safetensors file in the server's type
    rank 0:     every server at once: `update` (pause, load, resume) ─▶ version and probe checked

Invariants:
- the file is whole before a server is paused, so the pause lasts as long as the server's load;
- every server took the weights, or the sync fails; a server's own part and its second try are in `update`;
- no rank is in a collective while rank 0 is in a call: ranks meet before the calls, and learn how they went after.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from trainers.config import AsyncTrainerConfig
from trainers.distributed import Ranks
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.model import Policy, compute_dtype, export_state, gathered_parameters, probe_logprobs
from trainers.server import BACKEND, ServerClient, ServerFacts
from trainers.weight_sync.update import update_with_retry, verify

logger = logging.getLogger(__name__)
T = TypeVar("T")
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
    """`WeightSync` for servers that can read a folder of rank 0's. Construct it on every rank; only rank 0 talks to them."""

    def __init__(
        self, config: AsyncTrainerConfig, ranks: Ranks, tokenizer: Any = None, clients: Sequence[ServerClient] = ()
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.clients = list(clients) or [ServerClient(url, config.vllm_server_timeout) for url in config.server_urls]
        self.facts: list[ServerFacts] | None = None  # one per server
        self.dtype = "float32"  # what the trainer computes in, known once connected
        self.directory: Path | None = None
        self._lock = -1  # open descriptor of the folder, while there is one
        self.pushes = 0

    def push(self, policy: Policy, version: int) -> dict[str, float]:
        """See `WeightSync.push`; compares a probe's logprobs at the first push and every `weight_check_steps` pushes."""
        began = time.perf_counter()
        if self.facts is None:
            self.facts = self.ranks.rank_zero(lambda: self._connect(policy))
        dtype, longest = getattr(torch, self.facts[0].dtype), min(facts.max_model_len for facts in self.facts)
        self.ranks.barrier()
        waited = time.perf_counter() - began
        every = self.config.weight_check_steps
        checks = every > 0 and self.pushes % every == 0
        # On every rank before any call: the forward of sharded parameters is a collective.
        tokens = probe_tokens(self.tokenizer, policy.model.config.get_text_config().vocab_size)[: longest - 1]
        expected = probe_logprobs(policy, tokens, self.ranks.device) if checks else None
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

    def _each(self, work: Callable[[ServerClient], T]) -> list[T]:
        """`work` for every server, at the same time; raises the first server's error, once all are done."""
        if len(self.clients) == 1:
            return [work(self.clients[0])]
        with ThreadPoolExecutor(len(self.clients), thread_name_prefix="weight sync") as threads:
            return list(threads.map(work, self.clients))

    def _connect(self, policy: Policy) -> list[ServerFacts]:
        ours = self.dtype = str(compute_dtype(self.config, self.ranks.device) or policy.model.dtype).removeprefix("torch.")
        found = self._each(self._look)
        types = {facts.dtype for facts in found}
        if len(types) > 1:
            served = ", ".join(f"{client.url}: {facts.dtype}" for client, facts in zip(self.clients, found, strict=True))
            raise ServerCapabilityError(f"the servers compute in different types ({served}): serve all with --dtype {ours}")
        if ours not in types:
            logger.warning(
                "the trainer computes in %s, the server in %s: serve with --dtype %s to have them agree", ours, *types, ours
            )
        # A trainer that died in mid-sync may have left a server paused.
        self._each(lambda client: client.resume())
        return found

    def _look(self, client: ServerClient) -> ServerFacts:
        client.wait_healthy()
        facts = client.facts()
        if facts.weight_backend != BACKEND:
            raise ServerCapabilityError(
                f"{client.url} was started with weight transfer {facts.weight_backend!r}; this run needs the flag "
                f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\' (`loopwright serve MODEL` sets it)'
            )
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
            folder = str(self.directory)
            self._each(lambda client: client.init_weight_transfer(folder))
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
            raise WeightSyncError(f"a server cannot read the weight folder: {error}") from error
        except OSError as error:
            raise WeightSyncError(f"weights of version {version} could not be written: {error}") from error
        written = time.perf_counter() - began
        try:
            seconds = self._each(lambda client: update_with_retry(client, path, version))
        finally:
            path.unlink(missing_ok=True)
        metrics = {
            "perf/weight_sync_pause_s": max(paused for paused, _ in seconds),
            "perf/weight_sync_transfer_s": written + max(loaded for _, loaded in seconds),
            "perf/weight_sync_bytes": float(size),
        }
        assert self.facts is not None, "sent before the connection was made"
        tolerance = max(PROBE_TOLERANCE[self.facts[0].dtype], PROBE_TOLERANCE[self.dtype])
        differences = self._each(lambda client: verify(client, version, tokens, expected, tolerance))
        if expected is not None:
            metrics["perf/weight_probe_abs_diff"] = max(difference for difference in differences if difference is not None)
        return metrics
