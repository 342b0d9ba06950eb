"""`WeightSync` for any number of servers and any way.

    rank 0:      servers.json, members that answer ─▶ what to send, by which way   (every rank learns it)
    every rank:  probe's logprobs ─▶ gather and pack into buckets            (collectives)
    rank 0:      way.send ─▶ a second try for those that failed ─▶ version and probe checked

Invariants:
- no rank is in a collective while rank 0 is in a call: ranks meet before the calls, and learn how they went after;
- a server that fails twice leaves the group while others remain, else the sync fails; no server is left paused. The second try
  is made at once, or where it takes something of every rank, in a round of its own;
- if all of them died, one that comes is waited for and gets what they should have got;
- what joins or comes back gets every parameter; blocks that are never trained are sent once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainers.config import AsyncTrainerConfig
from trainers.distributed import Ranks
from trainers.errors import ServerCapabilityError, ServerError, WeightSyncError
from trainers.inference import InferenceEngine
from trainers.model import Policy, compute_dtype, probe_logprobs
from trainers.roster import Listed, Roster
from trainers.server import ServerClient, ServerFacts
from trainers.weight_sync.choose import check_like, check_member, choose
from trainers.weight_sync.ipc import Ipc, gpu_uuid, handle_of
from trainers.weight_sync.layout import Layout, make_layout
from trainers.weight_sync.lora import Adapters, StagedAdapter, compare
from trainers.weight_sync.members import Member, Members, each
from trainers.weight_sync.probe import PROBE_TOLERANCE, probe_tokens, verify
from trainers.weight_sync.staging import Staging, staging_device
from trainers.weight_sync.update import Seconds
from trainers.weight_sync.watch import Watch
from trainers.weight_sync.ways import Results, Way

logger = logging.getLogger(__name__)
FIRST_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 5.0
ROUNDS = 3  # in each of which every server died


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank must know of a sync before it begins."""

    dtype: str  # of the servers
    everything: bool
    on_host: bool
    every_rank: bool
    longest: int  # tokens a probe may have, with the one it generates
    newcomers: int  # servers that must be told where every rank's buckets are
    compares: bool  # a probe's logprobs
    adapter: bool  # it alone is sent


class ServerSync:
    """Construct it on every rank; only rank 0 talks to the servers.

    Args:
        way: instead of what the config says.
        managed: servers.json in the run's folder is this run's from the start (see `trainers.roster`).
        connect: makes the client of a server from its URL; default: a `ServerClient`.
    """

    def __init__(
        self,
        config: AsyncTrainerConfig,
        ranks: Ranks,
        tokenizer: Any = None,
        clients: Sequence[InferenceEngine] = (),
        way: Way | None = None,
        managed: bool = False,
        connect: Callable[[str], InferenceEngine] | None = None,
    ) -> None:
        self.config, self.ranks, self.tokenizer = config, ranks, tokenizer
        connect = connect or (lambda url: ServerClient(url, config.vllm_server_timeout))
        self.members = Members(clients or map(connect, config.server_urls))
        folder = Path(config.output_dir)
        self.watch = Watch(self.members, Roster(folder, managed), folder, connect)
        self.targets: list[Member] = []  # whom the sync under way sends to
        self.newcomers: set[Member] = set()  # those of them that never held the policy before
        self.first: ServerFacts | None = None  # what every later server must be like
        self.way = way
        self.dtype = "float32"  # what the trainer computes in
        self.layouts: dict[bool, Layout] = {}
        self.staging: Staging | None = None
        self.pushes = 0
        self.retried: set[Member] = set()  # in this sync, in a round of their own

    @property
    def clients(self) -> list[InferenceEngine]:
        return [member.client for member in self.members.all]

    def push(self, policy: Policy, version: int) -> dict[str, float]:
        """See `WeightSync.push`. Compares a probe's logprobs at every server's first two updates (it may load the second in
        another way than the first) and every `weight_check_steps` pushes."""
        metrics = self._sync(policy, version, newcomers_only=False)
        self.pushes += 1
        return metrics

    def admit(self, policy: Policy, version: int) -> None:
        """See `WeightSync.admit`."""
        self._sync(policy, version, newcomers_only=True)

    def wanting(self) -> bool:
        """See `WeightSync.wanting`."""
        return self.watch.wanting()

    def news(self) -> list[Listed] | None:
        """See `WeightSync.news`."""
        return self.watch.news()

    def serving(self) -> list[str]:
        """URLs of the servers that hold the policy of the last push, asked now; rank 0 only.

        Raises:
            ServerError: none does.
        """
        urls = self.watch.serving()
        if not urls:
            raise ServerError("no student server answers that holds the policy")
        return urls

    def _sync(self, policy: Policy, version: int, newcomers_only: bool) -> dict[str, float]:
        self.retried = set()
        for _ in range(ROUNDS):
            metrics = self._round(policy, version, newcomers_only)
            if metrics is not None:
                return metrics
        raise WeightSyncError(f"policy version {version} killed every student server that it was sent to, {ROUNDS} times")

    def _round(self, policy: Policy, version: int, newcomers_only: bool) -> dict[str, float] | None:
        """None: no server is left that could have taken it."""
        began = time.perf_counter()
        self.dtype = str(compute_dtype(self.config, self.ranks.device) or policy.model.dtype).removeprefix("torch.")
        uuids = self._gathered(gpu_uuid(self.ranks.device))
        task = self.ranks.rank_zero(lambda: self._prepare(uuids, newcomers_only))
        if task is None:
            return {}
        waited = time.perf_counter() - began
        tokens = probe_tokens(self.tokenizer, policy.model.config.get_text_config().vocab_size)[: task.longest - 1]
        expected = probe_logprobs(policy, tokens, self.ranks.device) if task.compares and not task.adapter else None
        staging = self._stage(policy, task)
        offers = self._gathered(self._offers(staging, task)) if task.every_rank and task.newcomers else []
        staged = time.perf_counter()
        tolerance = self._tolerance(task)
        metrics = self.ranks.rank_zero(lambda: self._send(staging, offers, version, tokens, expected, tolerance))
        if not metrics:
            return metrics
        if task.adapter and task.compares:
            metrics |= self._compare_adapters(policy, task, tokens)
        metrics["perf/weight_sync_transfer_s"] += staged - began - waited
        return {**metrics, "perf/weight_sync_barrier_s": waited, "perf/weight_sync_s": time.perf_counter() - began}

    def close(self) -> None:
        """Give back folders, memory and process groups."""
        if self.way is not None:
            self.way.close()
        self.staging = None

    @property
    def served_as(self) -> str | None:
        """See `WeightSync.served_as`."""
        return self.way.served_as if isinstance(self.way, Adapters) else None

    # Every rank ------------------------------------------------------------------------------------------------------

    def _gathered(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.ranks.world_size == 1:
            return [mine]
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, mine, group=self.ranks.control)
        return values

    def _compare_adapters(self, policy: Policy, task: Task, tokens: np.ndarray) -> dict[str, float]:
        tolerance = self._tolerance(task)
        inside = [member for member in self.targets if member.facts is not None]
        results = compare(policy, self.ranks, inside, tokens, tolerance)

        def judge() -> None:
            self._judge({member: results[member.client.url] for member in inside if member.client.url in results})
            self.watch.note()

        self.ranks.rank_zero(judge)
        differences = [result for result in results.values() if isinstance(result, float)]
        return {"perf/weight_probe_abs_diff": max(differences)} if differences else {}

    def _tolerance(self, task: Task) -> float:
        """Of a probe: the servers all compute in one type."""
        return max(PROBE_TOLERANCE[self.dtype], PROBE_TOLERANCE[task.dtype])

    def _stage(self, policy: Policy, task: Task) -> Staging:
        dtype = getattr(torch, task.dtype)
        if task.adapter:
            return StagedAdapter(policy, dtype, keep=self.ranks.is_main)
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

    def _prepare(self, uuids: list[str | None], newcomers_only: bool) -> Task | None:
        """What to send, and to whom; None: there is nobody to send to."""
        inside: list[Member] = []
        while not inside:
            came = self.members.gather(self._look, self.config.vllm_server_timeout, self.watch.refresh)
            for member in came:
                self._check_newcomer(member, uuids)
            inside = self.members.inside
        self.targets = [member for member in inside if member in came] if newcomers_only else inside
        if not self.targets:
            self.watch.note()
            return None
        self.newcomers = {member for member in self.targets if not member.joined}
        facts = [member.facts for member in self.targets if member.facts is not None]
        if self.first is None:
            self._check_types(inside, facts)
            self.first = replace(facts[0], max_model_len=min(fact.max_model_len for fact in facts))
        every = self.config.weight_check_steps
        if self.way is None:
            self.way = choose(self.config, inside, self.ranks.device, self.ranks.world_size, uuids)
        return Task(
            dtype=facts[0].dtype,
            everything=not all(member.complete for member in self.targets),
            on_host=self.way.on_host,
            every_rank=self.way.every_rank,
            longest=min(fact.max_model_len for fact in facts),
            # A retry may have to connect to any of them.
            newcomers=len(self.targets) if any(member.channel is None for member in self.targets) else 0,
            compares=every > 0 and (self.pushes % every == 0 or any(member.updates < 2 for member in self.targets)),
            adapter=isinstance(self.way, Adapters),
        )

    def _look(self, client: InferenceEngine) -> ServerFacts:
        # Looked at again and again: one that is not there must not hold up a run that has others.
        alone = not self.members.begun and len(self.members.all) == 1
        client.wait_healthy(min(FIRST_TIMEOUT_S if alone else HEALTH_TIMEOUT_S, self.config.vllm_server_timeout))
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

    def _check_newcomer(self, member: Member, uuids: list[str | None]) -> None:
        """Refuse a server that came to a run under way and is not like the first ones, or out of reach."""
        if self.first is None or self.way is None:
            return
        try:
            check_like(member, self.first)
            check_member(self.config, self.way, member, uuids)
        except ServerCapabilityError as error:
            self.members.refuse(member, error)

    def _send(
        self,
        staging: Staging,
        offers: list[Any],
        version: int,
        tokens: np.ndarray,
        expected: np.ndarray | None,
        tolerance: float,
    ) -> dict[str, float] | None:
        way = self.way
        assert way is not None, "sent before a way was chosen"
        if offers and isinstance(way, Ipc):
            way.offers = [_merged(handles) for handles in zip(*offers[1:], strict=True)]
        began = time.perf_counter()
        results = way.send(self.targets, staging, version)
        failed = {member: result for member, result in results.items() if isinstance(result, ServerError)}
        if failed and way.every_rank and self.ranks.world_size > 1 and not self.retried & failed.keys():
            # What they need to connect anew comes from every rank: a round of its own, in which they are new.
            self.retried |= failed.keys()
            for member, error in failed.items():
                self.members.leave(member, error)
            return None
        if failed and not self.retried & failed.keys():
            results |= self._again(way, list(failed), results, staging, version)
        self._settle(results, f"did not take policy version {version}, twice: ")
        done = {member: result for member, result in results.items() if isinstance(result, Seconds)}
        if not done:
            self.watch.note()
            return {} if self.members.inside else None
        sent = time.perf_counter()
        checked = each(list(done), lambda member: verify(member.client, version, tokens, expected, tolerance))
        self._judge(checked)
        self._settle({member: result for member, result in checked.items() if member.facts is not None}, "")
        for member in checked.keys() & set(self.members.inside):
            member.complete, member.joined, member.version = True, True, str(version)
            member.updates += 1
        self.watch.note()
        if not self.members.inside:
            return None
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
        answers = each(failed, lambda member: member.served(HEALTH_TIMEOUT_S))
        partial = staging.layout is not None and staging.layout.partial
        alive: list[Member] = []
        for member, served in answers.items():
            # One that was started anew lacks what is not staged: it stays out until the next sync sends everything.
            if not isinstance(served, ServerError) and not (partial and served != member.version):
                alive.append(member)
            member.forget()
        return way.send(alive, staging, version) if alive else {}

    def _judge(self, checked: Mapping[Member, object]) -> None:
        """One that serves other weights than its version says would be trusted: a new one is refused.

        Raises:
            WeightSyncError: it is not new, or there is no other.
        """
        for member, result in checked.items():
            if isinstance(result, WeightSyncError):
                if member not in self.newcomers or not set(self.members.inside) - self.newcomers:
                    raise result
                member.joined = False
                self.members.refuse(member, result)

    def _settle(self, results: Mapping[Member, object], failure: str) -> None:
        """Who failed leaves.

        Raises:
            WeightSyncError: nobody would remain, although one that failed is up.
            ServerCapabilityError: it cannot do what the run needs.
        """
        failed = {member: result for member, result in results.items() if isinstance(result, ServerError)}
        if not failed:
            return
        if len(failed) == len(self.members.inside):
            answers = each(list(failed), lambda member: member.served(HEALTH_TIMEOUT_S))
            up = [member for member, answer in answers.items() if not isinstance(answer, ServerError)]
            if up:
                error = failed[up[0]]
                if isinstance(error, ServerCapabilityError):
                    raise error
                raise WeightSyncError(f"{up[0].client.url} {failure}{error}" if failure else str(error)) from error
        for member, error in failed.items():
            if isinstance(error, ServerCapabilityError) and member in self.newcomers:
                self.members.refuse(member, error)
            else:
                self.members.leave(member, error)


def _merged(handles: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {uuid: handle for offer in handles for uuid, handle in offer.items()}
