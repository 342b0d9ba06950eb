"""One rollout: turns of the model and results of its tools, until it is done or its budget is.

    prompt (+ observation) ─▶ turn ─▶ read ─▶ no calls: done
                               ▲        └───▶ calls ─▶ tools ─▶ messages ─▶ tokenize everything anew ─┐
                               └──────────────────────────────────────────────────────────────────────┘

Invariants:
- a conversation that had a first turn ends in order whatever runs out: the cap on tool calls, `max_completion_length` (tokens
  sampled in all turns together) or the server's `max_model_len`. It is trained as far as it came, and marked as exhausted;
- calls that cannot be followed by another turn are not made: nobody would see what came of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainers.metrics import MetricBag
from trainers.rollouts.chat import Chat, Rendered
from trainers.rollouts.environments import Environments, with_observation
from trainers.rollouts.reconcile import reconcile
from trainers.rollouts.side_calls import SideCalls
from trainers.rollouts.tools import Toolbox
from trainers.types import Message, Prompt, Rollout, TurnRecord

_PROMPTS_KEPT = 64

Generate = Callable[[np.ndarray, int], Awaitable[TurnRecord]]
"""(prompt ids, most tokens) → a turn. Raises `RequestFailed`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a conversation."""

    completion_tokens: int  # sampled, all turns together
    sequence_tokens: int  # prompt and output of a turn


class Conversations:
    """What all conversations of a run share.

    Args:
        max_tool_calling_iterations: most times a conversation may call tools and go on; None: no such limit.
        fork_threshold_tokens: see `reconcile`.
        progress: called after every turn's tool calls.
    """

    def __init__(
        self,
        chat: Chat,
        tools: Toolbox,
        side: SideCalls,
        metrics: MetricBag,
        *,
        environments: Environments | None,
        max_tool_calling_iterations: int | None,
        fork_threshold_tokens: int,
        progress: Callable[[], None],
    ) -> None:
        self.chat, self.tools, self.environments = chat, tools, environments
        self._side, self._metrics, self._progress = side, metrics, progress
        self._max_iterations = max_tool_calling_iterations
        self._fork_threshold_tokens = fork_threshold_tokens
        self._begun: OrderedDict[str, Rendered] = OrderedDict()  # the newest prompts that were gone on from, by their id

    async def run(self, prompt: Prompt, generate: Generate, limits: Limits) -> Rollout:
        """A whole rollout, in an environment of its own where the run has them.

        Raises:
            RequestFailed: the server, a tool or the environment gave up on it.
        """
        if self.environments is None:
            return await self.converse(prompt, self.tools, generate, limits)
        async with self.environments.episode(prompt.data) as episode:
            if episode.observation is not None:
                messages = with_observation(prompt, episode.observation)
                prompt = replace(prompt, messages=messages, token_ids=self.chat.prompt_ids(messages))
            rollout = await self.converse(prompt, self.tools.bound_to(episode.environment), generate, limits)
            if self.environments.reward_name is not None:
                rollout.rewards[self.environments.reward_name] = await self.environments.reward(episode.environment)
        return rollout

    async def converse(self, prompt: Prompt, tools: Toolbox, generate: Generate, limits: Limits) -> Rollout:
        """The turns and tool calls that follow a prompt. Raises `RequestFailed`."""
        rollout = Rollout(prompt)
        messages: list[Message] = list(prompt.messages)
        prompt_ids, left = prompt.token_ids, limits.completion_tokens
        rendered: Rendered | None = None
        for iteration in range(self._max_iterations + 1 if self._max_iterations is not None else 2**31):
            turn = await generate(prompt_ids, left)
            rollout.turns.append(turn)
            left -= len(turn.output_ids)
            said = self.chat.read(prompt_ids, turn.output_ids)
            rollout.completion.append(said.message)
            if turn.finish_reason == "stop" and not said.calls:
                return rollout
            if turn.finish_reason != "stop" or left < 1 or iteration == self._max_iterations:
                break
            records, results = await tools.run(said.calls, len(rollout.turns) - 1, self._side)
            self._progress()
            rollout.tool_calls += records
            rollout.completion += results
            before = rendered or self._first(prompt)
            try:
                rendered = self.chat.rendered([*messages, said.message, *results], before)
                messages += [said.message, *results]
            except Exception:  # a template refuses what it cannot write: several calls in a message, for one
                messages += [self.chat.as_text(turn.output_ids), *results]
                rendered = self.chat.rendered(messages, before)
            prompt_ids = rendered.ids
            if len(prompt_ids) > limits.sequence_tokens - 1:
                break
        rollout.exhausted = True
        return rollout

    def _first(self, prompt: Prompt) -> Rendered:
        """The prompt as it was rendered; the rollouts of a group share it unless each was shown something else."""
        found = self._begun.get(prompt.id)
        if found is None or found.ids is not prompt.token_ids:
            found = self._begun[prompt.id] = self.chat.known(prompt.messages, prompt.token_ids)
            if len(self._begun) > _PROMPTS_KEPT:
                self._begun.popitem(last=False)
        return found

    def finish(self, rollout: Rollout) -> None:
        """Make its turns into training sequences, once."""
        rollout.reconciled = reconcile(rollout.turns, self._fork_threshold_tokens)

    def measure(self, rollouts: Sequence[Rollout]) -> None:
        """Add the `tools/`, `env/`, drift and environment-reward metrics of finished rollouts."""
        for rollout in rollouts:
            self._measure_drift(rollout)
            if self.tools.tools:
                self._measure_tools(rollout)
            name = self.environments.reward_name if self.environments is not None else None
            if name is not None and name in rollout.rewards:
                value = rollout.rewards[name]
                self._metrics.add(f"rewards/{name}_none_frac", float(value is None))
                if value is not None:
                    self._metrics.add(f"rewards/{name}", value)

    def _measure_drift(self, rollout: Rollout) -> None:
        add = self._metrics.add
        for drift in rollout.reconciled.drift if rollout.reconciled is not None else ():
            add("rollout/fork_frac", float(drift.kind == "fork"))
            add("rollout/realign_frac", float(drift.kind == "realign"))
            add("rollout/drift_tokens_mean", drift.tokens)
            add("rollout/drift_tokens_max", drift.tokens)

    def _measure_tools(self, rollout: Rollout) -> None:
        add = self._metrics.add
        calls = rollout.tool_calls
        add("tools/call_frequency", len(calls))
        add("tools/loop_exhausted_frac", float(rollout.exhausted))
        turns = len({call.turn for call in calls})
        if turns:
            add("tools/parallel_calls_mean", len(calls), turns)
        for call in calls:
            add("tools/failure_frequency", float(call.error))
            add("tools/latency_s", call.latency_s)
            tool = self.tools.tools.get(call.name)
            if tool is None:
                # Never a metric of its own: the model makes such names up. Without a name, the call was unreadable.
                add("tools/unknown_name_total", float(bool(call.name)))
                continue
            add(f"tools/{tool.name}/call_total", 1)
            add(f"tools/{tool.name}/failure_total", float(call.error))
            add(f"tools/{tool.name}/latency_s", call.latency_s)
            if tool.of_environment:
                add("env/step_s", call.latency_s)

    def describe(self) -> str:
        """What of it runs now, for the message of a run that makes no progress; empty if nothing does."""
        return f"; {self._side.pending} tool or environment calls run" if self._side.pending else ""

    async def close(self) -> None:
        """Close the environments that are left, and the threads."""
        if self.environments is not None:
            await self.environments.close()
        self._side.close()
