"""`WeightSync` for any number of servers and any way.

    rank 0:      members that answer ─▶ what to send, by which way           (every rank learns it)
    every rank:  probe's logprobs ─▶ gather and pack into buckets            (collectives)
    rank 0:      way.send ─▶ a second try for those that failed ─▶ version and probe checked

Invariants:
- no rank is in a collective while rank 0 is in a call: ranks meet before the calls, and learn how they went after;
- a server that fails twice leaves the group while others remain, else the sync fails; no server is left paused;
- what joins or comes back gets every parameter; blocks that are never trained are sent once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainers.config import AsyncTrainerConfig
from trainers.distributed import Ranks
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.inference import InferenceEngine
from trainers.model import Policy, compute_dtype, probe_logprobs
from trainers.server import ServerClient, ServerFacts
from trainers.weight_sync.choose import choose
from trainers.weight_sync.ipc import gpu_uuid, handle_of
from trainers.weight_sync.layout import Layout, make_layout
from trainers.weight_sync.members import Member, Members, each
from trainers.weight_sync.probe import PROBE_TOLERANCE, probe_tokens, verify
from trainers.weight_sync.staging import Staging, staging_device
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.ways import Results, Way

logger = logging.getLogger(__name__)
HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank must know of a sync before it begins."""

    dtype: str  # of the servers
    everything: bool
    on_host: bool
    every_rank: bool
    longest: int  # tokens a probe may have, with the one it generates
    newcomers: int  # servers that must be told where every rank's buckets are


class ServerSync:
    """Construct it on every rank; only rank 0 talks to the servers. `way`: instead of what the config says."""

    def __init__(
        self,
        config: AsyncTrainerConfig,
        ranks: Ranks,
        tokenizer: Any = None,
        clients: Sequence[InferenceEngine] = (),
        way: Way | None = None,
    ) -> None:
        self.config, self.ranks, self.tokenizer = config, ranks, tokenizer
        self.members = Members(clients or [ServerClient(url, config.vllm_server_timeout) for url in config.server_urls])
        self.way = way
        self.dtype = "float32"  # what the trainer computes in
        self.layouts: dict[bool, Layout] = {}
        self.staging: Staging | None = None
        self.pushes = 0

    @property
    def clients(self) -> list[InferenceEngine]:
        return [member.client for member in self.members.all]

    def push(self, policy: Policy, version: int) -> dict[str, float]:
        """See `WeightSync.push`. Compares a probe's logprobs at the first two pushes (a server may load the second in another
        way than the first) and every `weight_check_steps` pushes."""
        began = time.perf_counter()
        self.dtype = str(compute_dtype(self.config, self.ranks.device) or policy.model.dtype).removeprefix("torch.")
        uuids = self._gathered(gpu_uuid(self.ranks.device))
        task = self.ranks.rank_zero(lambda: self._prepare(uuids))
        waited = time.perf_counter() - began
        every = self.config.weight_check_steps
        checks = every > 0 and (self.pushes < 2 or self.pushes % every == 0)
        tokens = probe_tokens(self.tokenizer, policy.model.config.get_text_config().vocab_size)[: task.longest - 1]
        expected = probe_logprobs(policy, tokens, self.ranks.device) if checks else None
        staging = self._stage(policy, task)
        offers = self._gathered(self._offers(staging, task)) if task.every_rank and task.newcomers else []
        staged = time.perf_counter()
        metrics = self.ranks.rank_zero(lambda: self._send(staging, offers, version, tokens, expected))
        self.pushes += 1
        metrics["perf/weight_sync_transfer_s"] += staged - began - waited
        return {**metrics, "perf/weight_sync_barrier_s": waited, "perf/weight_sync_s": time.perf_counter() - began}

    def close(self) -> None:
        """Give back folders, memory and process groups."""
        if self.way is not None:
            self.way.close()
        self.staging = None

    # Every rank ------------------------------------------------------------------------------------------------------

    def _gathered(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.ranks.world_size == 1:
            return [mine]
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, mine, group=self.ranks.control)
        return values

    def _stage(self, policy: Policy, task: Task) -> Staging:
        dtype = getattr(torch, task.dtype)
        layout = self.layouts.get(task.everything)
        if layout is None:
            layout = self.layouts[task.everything] = make_layout(policy.model, dtype, everything=task.everything)
        if self.staging is None:
            host = torch.device("cpu")
            device = host if task.on_host else staging_device(self.ranks.device, layout)
            if task.every_rank and any(other.type == "cpu" for other in self._gathered(device)):
                device = host
            self.staging = Staging(device)
        self.staging.fill(policy, layout, dtype, keep=self.ranks.is_main or task.every_rank)
        return self.staging

    def _offers(self, staging: Staging, task: Task) -> list[dict[str, list[Any]]]:
        """For each newcomer, a handle to this rank's buckets; rank 0 makes its own when it connects."""
        if self.ranks.is_main or staging.device.type == "cpu":
            return []
        return [{str(gpu_uuid(self.ranks.device)): handle_of(staging.memory)} for _ in range(task.newcomers)]

    # Rank 0 ----------------------------------------------------------------------------------------------------------

    def _prepare(self, uuids: list[str | None]) -> Task:
        came = self.members.gather(self._look)
        inside = self.members.inside
        facts = [member.facts for member in inside if member.facts is not None]
        if came:
            self._check_types(inside, facts)
        if self.way is None:
            self.way = choose(self.config, inside, self.ranks.device, self.ranks.world_size, uuids)
        return Task(
            dtype=facts[0].dtype,
            everything=not all(member.complete for member in inside),
            on_host=self.way.on_host,
            every_rank=self.way.every_rank,
            longest=min(fact.max_model_len for fact in facts),
            # A retry may have to connect to any of them.
            newcomers=len(inside) if any(member.channel is None for member in inside) else 0,
        )

    def _look(self, client: InferenceEngine) -> ServerFacts:
        client.wait_healthy(None if self.pushes == 0 else HEALTH_TIMEOUT_S)
        facts = client.facts()
        # A trainer that died in mid-sync may have left it paused.
        client.resume()
        return facts

    def _check_types(self, members: Sequence[Member], facts: Sequence[ServerFacts]) -> None:
        types = {fact.dtype for fact in facts}
        if len(types) > 1:
            served = ", ".join(f"{member.client.url}: {fact.dtype}" for member, fact in zip(members, facts, strict=True))
            raise ServerCapabilityError(
                f"the servers compute in different types ({served}): serve all with --dtype {self.dtype}"
            )
        if self.dtype not in types and self.pushes == 0:
            logger.warning(
                "the trainer computes in %s, the server in %s: serve with --dtype %s to have them agree",
                self.dtype,
                *types,
                self.dtype,
            )

    def _send(
        self, staging: Staging, offers: list[Any], version: int, tokens: np.ndarray, expected: np.ndarray | None
    ) -> dict[str, float]:
        way, inside = self.way, self.members.inside
        assert way is not None, "sent before a way was chosen"
        if offers and hasattr(way, "offers"):
            way.offers = [_merged(handles) for handles in zip(*offers[1:], strict=True)]  # type: ignore[attr-defined]
        began = time.perf_counter()
        results = way.send(inside, staging, version)
        if failed := [member for member, result in results.items() if isinstance(result, ServerError)]:
            results |= self._again(way, failed, results, staging, version)
        self._settle(results, version, f"did not take policy version {version}, twice: ")
        done = {member: result for member, result in results.items() if isinstance(result, Seconds)}
        tolerance = max(PROBE_TOLERANCE[self.dtype], *(PROBE_TOLERANCE[m.facts.dtype] for m in done if m.facts))
        sent = time.perf_counter()
        checked = each(list(done), lambda member: verify(member.client, version, tokens, expected, tolerance))
        if wrong := next((result for result in checked.values() if isinstance(result, WeightSyncError)), None):
            raise wrong  # other weights under this version: the requests it answers would be trusted
        self._settle(checked, version, "")
        differences = [result for result in checked.values() if isinstance(result, float)]
        return {
            "perf/weight_sync_pause_s": max(seconds.pause for seconds in done.values()),
            "perf/weight_sync_load_s": max(seconds.load for seconds in done.values()),
            "perf/weight_sync_transfer_s": sent - began - max(seconds.pause for seconds in done.values()),
            "perf/weight_sync_bytes": float(way.bytes_sent),
        } | ({"perf/weight_probe_abs_diff": max(differences)} if differences else {})

    def _again(self, way: Way, failed: list[Member], results: Results, staging: Staging, version: int) -> Results:
        """A second try for those that still answer; as if they were new, because they may be other processes now."""
        for member in failed:
            logger.warning(
                "%s: weight sync to version %d failed, trying once more: %s", member.client.url, version, results[member]
            )
        answers = each(failed, _served)
        partial = staging.layout is not None and staging.layout.partial
        alive: list[Member] = []
        for member, served in answers.items():
            # One that was started anew lacks what is not staged: it stays out until the next sync sends everything.
            if not isinstance(served, ServerError) and not (partial and served != member.version):
                alive.append(member)
            member.forget()
        return way.send(alive, staging, version) if alive else {}

    def _settle(self, results: Mapping[Member, object], version: int, failure: str) -> None:
        """Who failed leaves, if others remain.

        Raises:
            WeightSyncError: nobody would remain.
        """
        failed = {member: result for member, result in results.items() if isinstance(result, ServerError)}
        for member in results.keys() - failed.keys():
            member.complete, member.version = True, str(version)
        if not failed:
            return
        if len(failed) == len(self.members.inside):
            member, error = next(iter(failed.items()))
            raise WeightSyncError(f"{member.client.url} {failure}{error}" if failure else str(error)) from error
        for member, error in failed.items():
            self.members.leave(member, error)


def _served(member: Member) -> str:
    """The version it serves, once it answers. Raises `ServerError`."""
    member.client.wait_healthy(HEALTH_TIMEOUT_S)
    return member.client.weight_version()


def _merged(handles: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {uuid: handle for offer in handles for uuid, handle in offer.items()}
