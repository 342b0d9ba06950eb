"""Core types, in the order data flows. NumPy only: flows, the CLI and the rollout process import them without torch.

    Prompt ─▶ Rollout, RolloutGroup ─▶ Sample ─▶ StepPlan ─▶ PackedRow ─▶ Step

Shapes: L tokens of one sequence, T tokens of one packed row, N trained tokens (loss terms) of one row, S samples of one
row. A loss term is one trained token: the row position that predicts it, its id, and what the loss needs to know of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from trainers.rollouts.reconcile import Reconciled

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row of one epoch, ready to be generated from.

    Example: `Prompt(epoch=0, row=17, messages=[{"role": "user", "content": "2+2="}], columns={"answer": "4"},
    token_ids=np.array([5, 9, 5, 2], np.int32))`.
    """

    epoch: int
    row: int
    messages: list[Message]
    columns: dict[str, Any]  # the row's other columns: keyword arguments of reward functions
    token_ids: np.ndarray  # int32 [P], the chat template's rendering with the generation prompt
    data: dict[str, Any] = field(default_factory=dict)  # the whole dataset row, the prompt column included

    @property
    def id(self) -> str:
        """Stable name within a run: `epoch:row`."""
        return f"{self.epoch}:{self.row}"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, stop) of a turn were sampled by policy `version`."""

    start: int
    stop: int
    version: int


@dataclass(slots=True)
class TurnRecord:
    """One generation call of a rollout.

    `output_logprobs` are the server's natural-log probabilities of the sampled ids at the sampling temperature; `spans`
    cover [0, len(output_ids)) without gaps.
    """

    prompt_ids: np.ndarray  # int32 [P]
    output_ids: np.ndarray  # int32 [O]
    output_logprobs: np.ndarray  # float32 [O]
    spans: list[VersionSpan]
    finish_reason: str  # "stop" (ended in EOS) or "length"
    top_ids: np.ndarray | None = None  # int32 [O, K], the sampler's K most likely ids, likeliest first, −1: none; if asked for
    top_logprobs: np.ndarray | None = None  # float32 [O, K], −inf: none
    candidate_ids: np.ndarray | None = None  # int32 [C], the ids each token was sampled among, one token's after another's
    candidate_counts: np.ndarray | None = None  # int32 [O], how many of them belong to each token; 0: the whole vocabulary
    began_s: float = 0.0  # Unix time
    ended_s: float = 0.0


@dataclass(slots=True)
class ToolCall:
    """One call the model made and what came of it. `error`: it failed, and `result` is the message the model was given."""

    turn: int  # the turn that asked for it, from 0
    name: str
    arguments: dict[str, Any]
    result: str
    error: bool
    began_s: float  # Unix time
    latency_s: float


@dataclass(slots=True)
class TeacherScores:
    """What a teacher said of the M trained tokens of one sequence: natural-log probabilities at `teacher_temperature`.

    Example: of trained tokens 7, 2 with the teacher's two likeliest asked for, `ids=[[3, 9], [4, -1]]` where 2 is itself one
    of the two, `logprobs=[[-0.2, -2.1], [-0.9, -inf]]`, `target_logprobs=[-3.0, -0.6]`, `known=[True, True]`.
    """

    teacher: str  # its name in the config
    ids: np.ndarray  # int32 [M, K], −1: none; never the realised token, which is in `target_logprobs`
    logprobs: np.ndarray  # float32 [M, K], −inf: none
    target_logprobs: np.ndarray  # float32 [M], of the realised token
    known: np.ndarray  # bool [M], False: the teacher said nothing of the position
    score_s: float = 0.0  # seconds that scoring the sequence took


@dataclass(slots=True)
class Rollout:
    """One conversation generated from a prompt.

    `completion` are all messages after the prompt's: the model's and the tools'. `reward` is NaN while unscored or when no
    reward function applied; `failed` holds the cause if the rollout was given up, `failed_by` the traceback of the user's code
    if it was that.
    """

    prompt: Prompt
    turns: list[TurnRecord] = field(default_factory=list)
    completion: list[Message] = field(default_factory=list)
    reward: float = float("nan")
    rewards: dict[str, float | None] = field(default_factory=dict)  # per reward function, None: not applicable
    failed: str | None = None
    failed_by: str | None = None
    duration_s: float = 0.0
    tool_calls: list[ToolCall] = field(default_factory=list)
    exhausted: bool = False  # ended by its token budget or the cap on tool calls, not by the model
    reconciled: Reconciled | None = None  # its turns as training sequences, once generated
    teacher_scores: list[TeacherScores] | None = None  # one of each of these sequences, once scored by a teacher

    @property
    def sampled_tokens(self) -> int:
        """Of all turns."""
        return sum(len(turn.output_ids) for turn in self.turns)


@dataclass(slots=True)
class RolloutGroup:
    """The rollouts of one prompt that did not fail, with their advantages once computed."""

    prompt: Prompt
    rollouts: list[Rollout]
    advantages: np.ndarray | None = None  # float32 [G], 0 where the rollout is unscorable

    @property
    def row_index(self) -> int:
        return self.prompt.row

    @property
    def rewards(self) -> np.ndarray:
        """float64 [G]; NaN marks an unscorable rollout."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)


@dataclass(slots=True)
class Sample:
    """One training sequence.

    Example: prompt ids [5, 9], completion ids [7, 2] with logprobs [-0.1, -0.3] sampled by policy 4 give
    `token_ids=[5, 9, 7, 2]`, `loss_mask=[F, F, T, T]`, `sampler_logprobs=[0, 0, -0.1, -0.3]`, `versions=[-1, -1, 4, 4]`.

    M is the number of trained tokens. The fields from `top_ids` on are None unless the objective asked for them: `top_ids` are
    ids whose log-probability under the policy it wants, `top_logprobs` those under the other model, sampler or teacher.
    """

    group: str  # `Prompt.id`
    token_ids: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]; True at trained tokens; never True at position 0
    sampler_logprobs: np.ndarray  # float32 [L]; 0 off the mask
    advantage: float  # 0 for recorded (SFT) rows
    version_min: int  # policy version of the oldest trained token
    versions: np.ndarray  # int32 [L], the policy version that sampled each trained token; -1 off the mask
    queued_at: float = 0.0  # monotonic seconds, set when it enters the queue
    metrics: dict[str, float] = field(default_factory=dict)
    top_ids: np.ndarray | None = None  # int32 [M, K], −1: none
    top_logprobs: np.ndarray | None = None  # float32 [M, K], −inf: none
    candidate_ids: np.ndarray | None = None  # int32 [C]
    candidate_counts: np.ndarray | None = None  # int32 [M]
    teacher: str | None = None  # its name in the config
    teacher_logprobs: np.ndarray | None = None  # float32 [M], of the trained tokens

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.token_ids, self.loss_mask, self.sampler_logprobs, self.versions)
        asked_for = (self.top_ids, self.top_logprobs, self.candidate_ids, self.candidate_counts, self.teacher_logprobs)
        return sum(array.nbytes for array in arrays) + sum(array.nbytes for array in asked_for if array is not None)


@dataclass(slots=True)
class StepPlan:
    """Which sample goes where: `rows[microbatch][rank]` lists indices into the step's samples. Pure data."""

    rows: list[list[list[int]]]


@dataclass(slots=True)
class PackedRow:
    """What one rank forwards in one micro-batch: samples laid end to end. Also the wire format.

    Two samples of 3 and 2 tokens give `position_ids=[0, 1, 2, 0, 1]` and `cu_seqlens=[0, 3, 5]`. The loss term of the
    token at row position p (p > its sample's start) has `token_index` p − 1. An empty row has T = 0.
    Where rows are lengthened to a multiple, the last sample ends in tokens of id 0 without a loss term.
    """

    input_ids: np.ndarray  # int32 [T]
    position_ids: np.ndarray  # int32 [T]
    cu_seqlens: np.ndarray  # int32 [S + 1]
    token_index: np.ndarray  # int32 [N], the row position whose logits predict the target
    targets: np.ndarray  # int32 [N]
    sampler_logprobs: np.ndarray  # float32 [N]
    advantages: np.ndarray  # float32 [N]
    sequence_index: np.ndarray  # int32 [N], which of the row's samples the term belongs to
    top_ids: np.ndarray  # int32 [N, K], as in `Sample`, −1: none; K = 0 if no sample of the step has them
    top_logprobs: np.ndarray  # float32 [N, K], −inf: none
    candidate_ids: np.ndarray  # int32 [C], one term's after another's
    candidate_counts: np.ndarray  # int32 [N], 0: the whole vocabulary; empty if no sample of the row has candidates
    teacher_logprobs: np.ndarray  # float32 [N], as in `Sample`; empty if no sample of the row has a teacher
    teacher_index: np.ndarray  # int32 [N], which of the config's `teachers`, −1: none; empty likewise

    FIELDS: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "position_ids",
        "cu_seqlens",
        "token_index",
        "targets",
        "sampler_logprobs",
        "advantages",
        "sequence_index",
        "top_ids",
        "top_logprobs",
        "candidate_ids",
        "candidate_counts",
        "teacher_logprobs",
        "teacher_index",
    )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts over the whole optimizer step: all ranks, all micro-batches. Losses are divided by these."""

    tokens: int  # trained tokens, N of the objectives
    sequences: int
    groups: int
    forwarded_tokens: int
    squared_tokens: int  # Σ L² over the sequences: what attention costs


@dataclass(slots=True)
class StepHead:
    """What every rank is told of an optimizer step. `metrics` maps catalog names to (numerator, denominator)."""

    index: int  # absolute, from 1
    totals: StepTotals
    metrics: dict[str, tuple[float, float]]


@dataclass(slots=True)
class Step(StepHead):
    """One optimizer step's work."""

    rows: list[list[PackedRow]]  # [microbatch][rank]
