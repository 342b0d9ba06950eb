"""From the turns of a conversation to training sequences: which sampled token stands where (NumPy only).

    turn 1: prompt ++ output      turn 2: prompt' ++ output'      …
                    └─ held ─┘ compared with prompt' ─▶ CLEAN | REALIGN | FORK

Every turn tokenizes the whole message list anew, so its prompt may differ from the tokens held so far. With `matched` their
common prefix, drift = len(held) − matched:

- 0: CLEAN, the turn continues the sequence;
- matched ≥ start of the last response, and drift below the threshold: REALIGN, the held tail gives way to the prompt's and is
  context from then on;
- else FORK: the turn begins a new sequence.

Invariants:
- a sequence's tokens are its last turn's prompt and output: that is what CLEAN and REALIGN come to;
- `origin` says of every token which sampled one it is; ids, mask and every per-token array follow from it;
- a sampled token is trained in at most one sequence; one that was overwritten, in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainers.types import TurnRecord

DriftKind = Literal["clean", "realign", "fork"]


@dataclass(frozen=True, slots=True)
class Drift:
    """How a turn after the first continued the one before it."""

    kind: DriftKind
    tokens: int  # held tokens that its prompt does not begin with


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence: L tokens.

    Example: turns [5, 9] → [7, 2] and [5, 9, 7, 2, 4] → [8] give `token_ids=[5, 9, 7, 2, 4, 8]`,
    `origin=[-1, -1, 0, 1, -1, 2]`.
    """

    token_ids: np.ndarray  # int32 [L]
    origin: np.ndarray  # int64 [L], index into all turns' outputs laid end to end; −1: context

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [L]."""
        return self.origin >= 0


@dataclass(frozen=True, slots=True)
class Reconciled:
    """A conversation's sequences, those without a trained token left out, and the drift of every turn after the first."""

    sequences: list[TokenSequence]
    drift: list[Drift]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens `a` and `b` have in common at their start."""
    limit = min(len(a), len(b))
    differs = a[:limit] != b[:limit]
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit


def reconcile(turns: Sequence[TurnRecord], fork_threshold_tokens: int) -> Reconciled:
    """The sequences of one conversation."""
    sequences: list[TokenSequence] = []
    drift: list[Drift] = []
    held = origin = np.empty(0, np.int64)
    response_start = sampled = 0
    for number, turn in enumerate(turns):
        prompt = np.asarray(turn.prompt_ids, np.int32)
        matched = common_prefix(held, prompt)
        lost = len(held) - matched
        if number:
            kind: DriftKind = (
                "clean" if lost == 0 else "realign" if matched >= response_start and lost < fork_threshold_tokens else "fork"
            )
            drift.append(Drift(kind, lost))
            if kind == "fork":
                sequences.append(TokenSequence(held, origin))
                matched = 0
        outputs = len(turn.output_ids)
        context = np.full(len(prompt) - matched, -1, np.int64)
        origin = np.concatenate([origin[:matched], context, np.arange(sampled, sampled + outputs)])
        origin[:1] = -1  # nothing predicts the first token of a sequence
        held = np.concatenate([prompt, np.asarray(turn.output_ids, np.int32)])
        response_start, sampled = len(prompt), sampled + outputs
    sequences.append(TokenSequence(held, origin))
    return Reconciled([sequence for sequence in sequences if (sequence.origin >= 0).any()], drift)
