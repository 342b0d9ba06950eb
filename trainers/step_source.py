"""What the trainer loop asks of whatever produces optimizer steps. NumPy only.

    trainer rank 0 ── request_step / ready / next_step / fetch / committed / synced ──▶ StepSource (the rollout process)
    its other ranks ── fetch, through `rows_address` ──────────────────────────────────────┘

A step's life: requested → planned (its samples leave the queue) → handed over: `next_step` says what it is and `fetch` gives
each rank its rows → trained → `committed`. Only then do its samples count as trained in the ledger. `snapshot` describes the
committed steps and no other: one that was planned or handed over and not committed goes into the buffer and is made again after
a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainers.roster import Listed
from trainers.types import PackedRow, StepHead

STATE_FILE = "rollout_state.json"
BUFFER_FILE = "rollout_buffer.npz"
KEPT_FILE = "rollouts_kept.json"


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a source knows once it has read its data.

    `token_budget` is the most tokens a packed row may hold (None: rows of a fixed number of samples); `vocab_size` is one more
    than the largest token id the tokenizer can produce; `prompts` the prompts of one epoch (None: a stream, whose length shows
    at its end); `fingerprint` that of the dataset.
    """

    prompts: int | None
    fingerprint: str
    token_budget: int | None
    max_sequence_tokens: int
    vocab_size: int


class StepSource(Protocol):
    """Produces optimizer steps in order. All methods block unless said, and raise the `RolloutError`, `DatasetError` or
    `ServerError` with which the source failed, as soon as that is known."""

    def start(self, *, resume_dir: Path | None, version: int, world_size: int, resume_step: int) -> SourceInfo:
        """Read the data and, from `resume_dir` (a checkpoint folder), the ledger; nothing is generated before that, nor before
        the first `synced`. `version` is the policy version of the weights the trainer holds, `world_size` how many of its ranks
        have rows of their own, `resume_step` the last committed step."""
        ...

    def request_step(self, index: int, train_version: int) -> None:
        """Ask for step `index` ahead of need, without waiting; at most one request may be open. `train_version` is the policy
        version at which that step *will* train: samples more than `max_staleness` behind it are dropped when the step is
        planned."""
        ...

    def ready(self, index: int, train_version: int, timeout_s: float) -> bool:
        """Whether `next_step` has an answer; waits for it up to `timeout_s`. Asks for the step if `request_step` did not."""
        ...

    def next_step(self, index: int, train_version: int) -> StepHead | None:
        """Wait for step `index` (asking for it if `request_step` did not). None: the data is finished, now and for good."""
        ...

    passes: float
    """Passes over the prompts once every step handed over is trained, as of the last `next_step`."""

    def fetch(self, index: int, rank: int) -> list[PackedRow]:
        """The rows of one of these ranks in a step that was handed over and is not committed, one per micro-batch."""
        ...

    @property
    def rows_address(self) -> str | None:
        """Where the other ranks of this node fetch their rows themselves (`RowClient`); None: only here. Known once started."""
        ...

    def check(self) -> None:
        """Raise what ended the source, if anything did: called when a rank could not fetch its rows."""
        ...

    def committed(self, index: int) -> None:
        """The optimizer step `index` is done: its samples are trained. Does not wait."""
        ...

    def synced(self, version: int, served_as: str | None = None) -> None:
        """The servers hold policy `version`; sources that do not generate ignore it. Does not wait.

        `served_as`: the adapter that requests of this version name. It stays for `max_staleness` further versions; what is
        still generated with it then is to be given up. None: the served model itself, which changes under requests in flight.
        """
        ...

    def servers(self, servers: Sequence[Listed]) -> None:
        """These servers hold the policy of the last `synced` and answer; those no longer among them are not to be used. Sources
        that do not generate ignore it. Does not wait."""
        ...

    def snapshot(self, directory: Path) -> dict[str, Any]:
        """Write `rollout_state.json` and, if asked for, `rollout_buffer.npz` into `directory`; returns the state as written.
        What `drain_rollouts` gave with steps that are not committed is written too, and given again after a resume."""
        ...

    def drain_rollouts(self) -> list[dict[str, Any]]:
        """Rollouts to look at, since the last call: step, epoch, row, prompt, completion, reward, advantage, … Those with a
        `trace` (see `trainers.rollouts.trace`) are to be kept, the others are the step's own and to be printed. Does not
        wait."""
        ...

    def close(self) -> None:
        """End the source and everything it started. Safe to call twice, and after a failure."""
        ...
