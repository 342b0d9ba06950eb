"""The adapter alone (`weight_sync=lora`): a new adapter in the server per version, beside those that rollouts still use.

    every rank: gather the adapter ─▶ rank 0: <output_dir>/.vllm_lora/policy-v<N>, by rename ─▶ every server: load it
    next sync: what left the window is unloaded and its folder deleted

Nothing is paused, and the base weights in the servers are never touched. A version stays for `max_staleness` further syncs, and
one more: at the sync that ends its window the rollout side is told, and aborts what still uses it; only then it goes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from trainers import lora
from trainers.adapters import adapter_name, new_run, version_of
from trainers.config import AsyncTrainerConfig
from trainers.config_peft import AdapterServing
from trainers.distributed import Ranks
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.inference import AdapterEngine
from trainers.model import Policy, probe_logprobs
from trainers.weight_sync.members import Member, each
from trainers.weight_sync.staging import Staging
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.ways import Results

logger = logging.getLogger(__name__)
FOLDER = ".vllm_lora"
SAMPLED_TOKENS = 24


class StagedAdapter(Staging):
    """The adapter of one version in the servers' type, whole on rank 0's host; made on every rank."""

    def __init__(self, policy: Policy, dtype: torch.dtype, keep: bool) -> None:
        super().__init__(torch.device("cpu"))
        self.model: PreTrainedModel = policy.model
        self.state = lora.adapter_state(policy.model, keep, dtype)


class Adapters:
    """Way `lora`. Args: max_staleness: syncs for which rollouts may still begin a turn under a version."""

    name: ClassVar[str] = "lora"
    on_host: ClassVar[bool] = True
    every_rank: ClassVar[bool] = False

    def __init__(self, output_dir: str, max_staleness: int) -> None:
        self.folder = Path(output_dir).absolute() / FOLDER
        self.max_staleness = max_staleness
        self.run = new_run()
        self.versions: list[int] = []  # whose folders are there, oldest first
        self.bytes_sent = 0
        shutil.rmtree(self.folder, ignore_errors=True)  # an earlier process's: its rollouts are gone

    @property
    def served_as(self) -> str | None:
        """What requests of the newest version name as their model."""
        return adapter_name(self.versions[-1], self.run) if self.versions else None

    def send(self, members: Sequence[Member], staging: Staging, version: int) -> Results:
        """See `Way.send`."""
        assert isinstance(staging, StagedAdapter), f"an adapter is sent, {type(staging).__name__} was staged"
        if version not in self.versions:
            self._write(staging, version)
        left = [old for old in self.versions if old < version - 1 - self.max_staleness]
        self.versions = [old for old in self.versions if old not in left]
        results = each(members, self._load)
        for old in left:
            shutil.rmtree(self._folder(old), ignore_errors=True)
        return results

    def close(self) -> None:
        """The last adapter stays, in the servers and as a file, because it may still be asked for: by an evaluation."""
        for version in self.versions[:-1]:
            shutil.rmtree(self._folder(version), ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self.folder / f"policy-v{version}"

    def _write(self, staging: StagedAdapter, version: int) -> None:
        temporary = self.folder / f".tmp-policy-v{version}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            lora.save_adapter(staging.model, staging.state, temporary)
            shutil.rmtree(self._folder(version), ignore_errors=True)
            temporary.rename(self._folder(version))
        except OSError as error:
            raise WeightSyncError(f"the adapter of version {version} could not be written to {self.folder}: {error}") from error
        self.bytes_sent = sum(path.stat().st_size for path in self._folder(version).iterdir())
        self.versions.append(version)

    def _load(self, member: Member) -> Seconds:
        """Make a server's adapters those of `versions`. Raises `ServerError`."""
        engine: Any = member.client
        began = time.perf_counter()
        wanted = {adapter_name(version, self.run): version for version in self.versions}
        there = engine.loaded_adapters()
        for name in there:
            # Also those that a trainer which died has left; adapters of somebody else's are not ours to remove.
            if version_of(name) is not None and name not in wanted:
                engine.unload_adapter(name)
        for name, version in wanted.items():
            if name not in there:
                _load_one(engine, name, self._folder(version))
        engine.adapter = next(reversed(wanted))
        return Seconds(0.0, time.perf_counter() - began)


def _load_one(engine: AdapterEngine, name: str, folder: Path) -> None:
    try:
        engine.load_adapter(name, str(folder))
    except ServerError as error:
        if "No adapter found" not in str(error):
            raise
        raise ServerCapabilityError(
            f"{engine.url} cannot read {folder}: set output_dir to a folder that trainer and server both see, or "
            "weight_sync=nccl, which sends the merged weights (to a server without --enable-lora)"
        ) from error


def choose_adapters(config: AsyncTrainerConfig, members: Sequence[Member]) -> Adapters | None:
    """The way of adapters, if run and servers have it; None: merged weights.

    Raises:
        ServerCapabilityError: `weight_sync=lora`, or a server that takes adapters, with what to start the servers with.
    """
    serving = config.adapter_serving
    told = {member: member.facts.adapters for member in members if member.facts}
    takers = [member for member, adapters in told.items() if adapters is not None]
    if serving is None:
        cause = config.peft.merged_only if config.peft is not None else None
        if takers:
            own = "a run without `peft`" if config.peft is None else f"weight_sync={config.weight_sync}"
            why = f"peft {cause}" if cause else own
            raise ServerCapabilityError(
                f"{takers[0].client.url} was started with --enable-lora, and {why} sends whole weights, which such a server "
                "may not survive: start it without --enable-lora"
            )
        if cause:
            logger.warning("peft %s: no server takes that as an adapter, the merged weights are sent", cause)
        return None
    start = _start_with(serving)
    if len(takers) < len(told):
        if config.weight_sync == "auto" and not takers:
            logger.warning(
                "the servers take no adapters, so the merged weights are sent, all of them at every sync: start vLLM with %s "
                "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment to send the adapter alone",
                start,
            )
            return None
        url = next(member.client.url for member in told if member not in takers)
        raise ServerCapabilityError(
            f"{url} takes no adapters: start it with {start} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    logger.info("weights are sent by lora: the servers take adapters")
    return Adapters(config.output_dir, config.max_staleness)


def check_takes(config: AsyncTrainerConfig, member: Member) -> None:
    """Raises `ServerCapabilityError` unless it can hold this run's adapters, all versions of the window at once."""
    serving, adapters = config.adapter_serving, member.facts.adapters if member.facts else None
    assert serving is not None and adapters is not None, f"{member.client.url} was asked for adapters"
    if lines := adapters.lacking(*serving):
        raise ServerCapabilityError(
            f"{member.client.url} cannot take this run's adapters: {'; '.join(lines)}. Start it with {_start_with(serving)}"
        )


def _start_with(serving: AdapterServing) -> str:
    return f"--enable-lora --max-lora-rank {serving.max_lora_rank} --max-loras {serving.max_loras}"


def compare(
    policy: Policy, ranks: Ranks, members: Sequence[Member], tokens: np.ndarray, tolerance: float
) -> dict[str, float | WeightSyncError]:
    """By the URL of each server that answers, the largest absolute difference, in nats, between its and the trainer's
    log-probabilities of what it samples, or that it is too large. Called by every rank; `members` on rank 0.

    Sampled tokens and not those of a prompt: prompt logprobs with an adapter, while others generate, end a vLLM server.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size

    def ask() -> list[tuple[str, np.ndarray, np.ndarray]]:
        answers = each(list(members), lambda member: _sampled(member, tokens, vocabulary))
        return [(member.client.url, *answer) for member, answer in answers.items() if not isinstance(answer, ServerError)]

    results: dict[str, float | WeightSyncError] = {}
    for url, ids, logprobs in ranks.rank_zero(ask):
        mine = probe_logprobs(policy, np.concatenate([tokens, ids]).astype(np.int32), ranks.device)[len(tokens) - 1 :]
        difference = np.abs(mine - logprobs)
        results[url] = float(difference.max())
        if not difference.mean() <= tolerance:
            results[url] = WeightSyncError(
                f"the adapter in {url} gives log-probabilities that differ from the trainer's by {difference.mean():.4g} nats "
                f"on average (largest {difference.max():.4g}, tolerance {tolerance:g}): it serves another base model or dtype"
            )
    return results


def _sampled(member: Member, tokens: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    engine: Any = member.client
    return engine.sampled(tokens, SAMPLED_TOKENS, vocabulary)
