"""Which rollouts are looked at: rows to print and to keep, with the whole conversation as spans (`trace`).

    finished group ─┬─ every n-th rollout of the run ─▶ row with a `trace` ─┐
                    └─ with `log_completions`: row ─▶ held with its group   ├─▶ drained with a step ─▶ trainer
                                          (step planned) its groups' rows ──┘

Invariants:
- nothing is made of a rollout that is neither kept nor printed;
- the first rollout of a run is kept, and after it every n-th, counted on over resumes;
- a kept row goes with a step, and is held until that one is committed: a snapshot has what nobody may have written down yet;
- what is held is bounded: kept rows by number, their texts by length, printed rows by the groups queued and planned.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainers.config import AsyncTrainerConfig, TrainerConfig
from trainers.rollouts.trace import cut, rollout_trace
from trainers.types import Message, RolloutGroup

KEPT_BETWEEN_STEPS = 64
MAX_CELL_CHARS = 4000  # of a prompt or completion


class Inspection:
    """Chooses among finished rollouts. `finished` and `held` are part of the run's snapshot."""

    def __init__(self, config: TrainerConfig) -> None:
        self.finished = 0  # rollouts of the run so far
        generates = isinstance(config, AsyncTrainerConfig)
        self._every = config.keep_rollout_every if generates else 0
        self._prints = generates and config.log_completions
        self._limit = config.num_completions_to_print if generates else None
        self._print_every = getattr(config, "log_completions_steps", 1)  # samples
        self._unprinted = 0  # samples of steps since the last that was printed
        self._seed = config.seed
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT_BETWEEN_STEPS)  # the newest if there were many
        self._groups: dict[str, tuple[list[dict[str, Any]], int]] = {}  # rows to print, and samples not yet settled
        self._drained = self._committed = 0
        self._sent: dict[int, list[dict[str, Any]]] = {}  # kept rows by the step they went with, until that is committed

    def take(self, group: RolloutGroup, outcome: str, samples: int) -> None:
        """A group finished and gave `samples` to the queue; `outcome` is `kept` or the cause it was dropped for."""
        for number, rollout in enumerate(group.rollouts):
            if self._every and self.finished % self._every == 0:
                self._kept.append({**rollout_row(group, number, outcome), "trace": rollout_trace(rollout)})
            self.finished += 1
        if self._prints and samples:
            self._groups[group.prompt.id] = [rollout_row(group, n, outcome) for n in range(len(group.rollouts))], samples

    def settled(self, group: str) -> None:
        """One queued sample of a group was trained or dropped."""
        if group in self._groups:
            rows, left = self._groups.pop(group)
            if left > 1:
                self._groups[group] = rows, left - 1

    def drain(self, step: int, groups: Iterable[str]) -> list[dict[str, Any]]:
        """Rows to send with a step that trains samples of `groups`: those kept since the last call have a `trace`, the step's
        own, which are to be printed and sent once, have none. A group spread over steps is shown with each of them."""
        kept = list(self._kept)
        self._kept.clear()
        if kept and step > self._committed:
            self._sent.setdefault(step, []).extend(kept)
        new, self._drained = step > self._drained, step
        rows = self._rows_to_print(list(groups)) if new else []
        if self._limit is not None and len(rows) > self._limit:
            chosen = np.random.default_rng([self._seed, step]).choice(len(rows), self._limit, replace=False)
            rows = [rows[index] for index in sorted(chosen)]
        return [*kept, *rows]

    def _rows_to_print(self, groups: list[str]) -> list[dict[str, Any]]:
        """Those of a step with one sample of each of `groups`, if enough samples have gone by without any printed."""
        self._unprinted += len(groups)
        if self._unprinted < self._print_every:
            return []
        self._unprinted = 0
        return [row for group in dict.fromkeys(groups) for row in self._groups.get(group, ([], 0))[0]]

    def committed(self, step: int) -> None:
        """Step `step` was trained, and what went with it written down."""
        self._committed = step
        self._sent = {index: rows for index, rows in self._sent.items() if index > step}

    def held(self) -> list[dict[str, Any]]:
        """Kept rows that went with no committed step, in order; `restore` takes them."""
        return [*(row for _, rows in sorted(self._sent.items()) for row in rows), *self._kept]

    def restore(self, finished: int, rows: Iterable[dict[str, Any]]) -> None:
        """Go on from a snapshot."""
        self.finished = finished
        self._kept.extend(rows)


def rollout_row(group: RolloutGroup, number: int, outcome: str) -> dict[str, Any]:
    """One rollout of a group in a line; None where there is no number."""
    rollout = group.rollouts[number]
    drift = rollout.reconciled.drift if rollout.reconciled is not None else []
    return {
        "epoch": group.prompt.epoch,
        "row": group.prompt.row,
        "prompt": cut(conversation_text(rollout.prompt.messages), MAX_CELL_CHARS),
        "completion": cut(conversation_text(rollout.completion), MAX_CELL_CHARS),
        "reward": _finite(rollout.reward),
        **{f"rewards/{name}": _finite(value) for name, value in rollout.rewards.items()},
        "advantage": None if group.advantages is None else _finite(group.advantages[number]),
        "tokens": rollout.sampled_tokens,
        "turns": len(rollout.turns),
        "tool_calls": len(rollout.tool_calls),
        "tool_failures": sum(call.error for call in rollout.tool_calls),
        "forks": sum(one.kind == "fork" for one in drift),
        "realigns": sum(one.kind == "realign" for one in drift),
        "drift_tokens": sum(one.tokens for one in drift),
        "finish_reason": rollout.turns[-1].finish_reason if rollout.turns else None,
        "version": max((span.version for turn in rollout.turns for span in turn.spans), default=None),
        "duration_s": round(rollout.duration_s, 3),
        "outcome": outcome,
    }


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def conversation_text(messages: Iterable[Message]) -> str:
    """Messages as a person reads them: `→ name {arguments}` is a tool call, `← name: text` its answer.

    A single message is its text alone, and so are prompts of several.
    """
    return "\n".join(line for message in messages for line in _lines(message))


def _lines(message: Message) -> Iterable[str]:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json(content)
    if message.get("role") == "tool":
        yield f"← {message.get('name', 'tool')}: {text}"
        return
    calls = message.get("tool_calls") or []
    if text or not calls:
        yield text
    for call in calls:
        function = call.get("function") or call
        arguments = function.get("arguments", {})
        yield f"→ {function.get('name')} {arguments if isinstance(arguments, str) else _json(arguments)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
