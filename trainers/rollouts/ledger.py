"""Which prompt of which epoch is where: every (epoch, row) exactly once, whatever was killed when.

    pending ─▶ in flight ─▶ scored ─▶ queued ─▶ trained
       └───────────┴───────────┴─────────┴────▶ dropped(cause)

Rules:
- `COUNTS` is the one table of what counts towards the epoch;
- a queued group is settled sample by sample: it is *trained* once all its samples are settled and at least one was used by a
committed
  optimizer step, *dropped* if none was;
- a group with a trained sample is never generated again: after a resume it is trained, plus what the buffer still holds of it;
- states that do not count are lost with the process: a resumed ledger has them pending.

Prompts are numbered by *position*: row `order(epoch)[position]`, a permutation drawn from (seed, epoch).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

FORMAT = 1
Key = tuple[int, int]  # (epoch, row)


class State(IntEnum):
    PENDING = 0
    IN_FLIGHT = 1
    SCORED = 2
    QUEUED = 3
    TRAINED = 4
    DROPPED = 5


COUNTS: dict[State, bool] = {
    State.PENDING: False,
    State.IN_FLIGHT: False,
    State.SCORED: False,
    State.QUEUED: False,
    State.TRAINED: True,
    State.DROPPED: True,  # stale, zero_variance, filtered, too_long, oversize, failed, empty
}
_COUNTS = np.array([COUNTS[state] for state in State])
_NEXT: dict[State, tuple[State, ...]] = {
    State.PENDING: (State.IN_FLIGHT, State.QUEUED),  # queued: restored from the buffer
    State.IN_FLIGHT: (State.SCORED, State.DROPPED),
    State.SCORED: (State.QUEUED, State.DROPPED),
    State.QUEUED: (State.TRAINED, State.DROPPED),
    State.TRAINED: (State.QUEUED,),  # a partly trained group whose other samples came back from the buffer
    State.DROPPED: (),
}


@dataclass(slots=True)
class _Epoch:
    order: np.ndarray  # int64 [prompts], row at each position
    position: np.ndarray  # int64 [prompts], inverse of order
    states: np.ndarray  # int8 [prompts], by position
    limit: int  # positions of this epoch that are to be done
    cursor: int = 0  # no pending position below it
    open: int = 0  # positions that do not count yet
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Settling:
    left: int
    trained: int = 0
    cause: str = ""


class Ledger:
    """The ledger of one run.

    Args:
        prompts: rows of the dataset.
        seed, shuffle: the order of each epoch; a restored ledger keeps those it was begun with.
        epochs: passes to make (fractions of an epoch are rounded up to whole prompts), or None: without end.
    """

    def __init__(self, prompts: int, seed: int, shuffle: bool, epochs: float | None) -> None:
        assert prompts > 0, prompts
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.summary: dict[int, dict[str, Any]] = {}  # finished epochs: {"trained": n, "dropped": {cause: n}}
        self._first = 0  # the oldest epoch not done
        self._open: dict[int, _Epoch] = {}
        self._settling: dict[Key, _Settling] = {}

    # Order

    def order(self, epoch: int) -> np.ndarray:
        """Row at each position of an epoch."""
        if not self.shuffle:
            return np.arange(self.prompts)
        return np.random.default_rng([self.seed, epoch]).permutation(self.prompts)

    def _limit(self, epoch: int) -> int:
        if self.epochs is None:
            return self.prompts
        # Not ceil alone: 0.1 × 30 is 3.0000000000000004.
        total = math.ceil(round(self.epochs * self.prompts, 6))
        return min(self.prompts, max(0, total - epoch * self.prompts))

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._open:
            assert epoch >= self._first, f"epoch {epoch} is done, the oldest open one is {self._first}"
            order = self.order(epoch)
            position = np.empty_like(order)
            position[order] = np.arange(self.prompts)
            limit = self._limit(epoch)
            self._open[epoch] = _Epoch(order, position, np.zeros(self.prompts, np.int8), limit, open=limit)
        return self._open[epoch]

    # Transitions

    def _find(self) -> Key | None:
        epoch = self._first
        while self._limit(epoch) > 0:
            entry = self._epoch(epoch)
            while entry.cursor < entry.limit and entry.states[entry.cursor] != State.PENDING:
                entry.cursor += 1
            if entry.cursor < entry.limit:
                return epoch, int(entry.order[entry.cursor])
            epoch += 1
        return None

    @property
    def exhausted(self) -> bool:
        """No prompt is pending, now and for good."""
        return self._find() is None

    def next(self) -> Key | None:
        """Take the next pending prompt, in order; it is in flight from now on. None: there is no more to take."""
        key = self._find()
        if key is not None:
            self._set(key, State.IN_FLIGHT)
        return key

    def state(self, key: Key) -> State:
        epoch, row = key
        if epoch < self._first:
            return State.TRAINED  # or dropped: finished epochs keep only counts
        entry = self._epoch(epoch)
        return State(int(entry.states[entry.position[row]]))

    def _set(self, key: Key, new: State) -> None:
        entry = self._epoch(key[0])
        position = entry.position[key[1]]
        old = State(int(entry.states[position]))
        assert new in _NEXT[old], f"prompt {key[0]}:{key[1]} cannot go from {old.name} to {new.name}"
        entry.states[position] = new
        entry.open += int(COUNTS[old]) - int(COUNTS[new])
        if old is State.TRAINED:
            entry.trained -= 1

    def scored(self, key: Key) -> None:
        self._set(key, State.SCORED)

    def queued(self, key: Key, samples: int) -> None:
        """The group's `samples` entered the queue."""
        assert samples > 0, samples
        self._set(key, State.QUEUED)
        self._settling[key] = _Settling(samples)

    def restored(self, key: Key, samples: int) -> None:
        """Samples of this group came back from the buffer."""
        trained = self.state(key) is State.TRAINED
        self._set(key, State.QUEUED)
        self._settling[key] = _Settling(samples, trained=int(trained))

    def dropped(self, key: Key, cause: str) -> None:
        """The whole group is given up before it entered the queue."""
        self._set(key, State.DROPPED)
        self._epoch(key[0]).dropped[cause] += 1
        self._retire()

    def settle(self, key: Key, cause: str | None = None) -> bool:
        """One queued sample was used by a committed step, or dropped for `cause`. True: that dropped the whole group."""
        group = self._settling[key]
        group.left -= 1
        group.trained += cause is None
        group.cause = cause or group.cause
        if group.left:
            return False
        del self._settling[key]
        entry = self._epoch(key[0])
        if group.trained:
            self._set(key, State.TRAINED)
            entry.trained += 1
        else:
            self._set(key, State.DROPPED)
            entry.dropped[group.cause] += 1
        self._retire()
        return not group.trained

    def _retire(self) -> None:
        while self._first in self._open and self._open[self._first].open == 0:
            entry = self._open.pop(self._first)
            self.summary[self._first] = {"trained": entry.trained, "dropped": dict(entry.dropped)}
            self._first += 1

    # Questions

    @property
    def done(self) -> int:
        """Prompts that count, over all epochs."""
        closed = self._first and (self._first - 1) * self.prompts + self._limit(self._first - 1)
        return closed + sum(entry.limit - entry.open for entry in self._open.values())

    def size(self, epoch: int) -> int:
        """Prompts to be done in this epoch."""
        return self._limit(epoch)

    # Persistence

    def state_dict(self) -> dict[str, Any]:
        """What counts, as JSON. Positions are in the order of each epoch, ranges half-open."""
        ahead, partial = {}, [list(key) for key, group in self._settling.items() if group.trained]
        epochs = {str(epoch): counts for epoch, counts in self.summary.items()}
        for epoch, entry in sorted(self._open.items()):
            done = _COUNTS[entry.states]
            for key_epoch, row in partial:
                if key_epoch == epoch:
                    done[entry.position[row]] = True
            ahead[epoch] = done
            epochs[str(epoch)] = {"trained": entry.trained, "dropped": dict(entry.dropped)}
        first = ahead.get(self._first, np.zeros(self.prompts, bool))
        next_index = int(np.argmin(first)) if not first.all() else self.prompts
        drops: Counter[str] = Counter()
        for counts in epochs.values():
            drops.update(counts["dropped"])
        return {
            "format": FORMAT,
            "epoch": self._first,
            "next_index": next_index,
            "done": {str(epoch): _ranges(done, next_index if epoch == self._first else 0) for epoch, done in ahead.items()},
            "partial": partial,
            "epochs": epochs,
            "dropped": dict(drops),
            "prompts": self.prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into a fresh ledger. Partly trained groups are trained until `restored` reopens them."""
        assert state["format"] == FORMAT and state["prompts"] == self.prompts, (state["format"], state["prompts"])
        assert not self._open and not self.summary, "a ledger is restored before it is used"
        self.seed, self.shuffle, self._first = state["seed"], state["shuffle"], state["epoch"]
        partial = {tuple(key) for key in state["partial"]}
        for name, counts in state["epochs"].items():
            if int(name) < self._first:
                self.summary[int(name)] = counts
        for name in sorted({*state["done"], str(self._first)}, key=int):
            epoch = int(name)
            if self._limit(epoch) == 0:
                continue
            entry = self._epoch(epoch)
            done = np.zeros(self.prompts, bool)
            done[: state["next_index"] if epoch == self._first else 0] = True
            for start, stop in state["done"].get(name, []):
                done[start:stop] = True
            # Trained or dropped makes no difference any more, except to the counts.
            entry.states[done] = State.TRAINED
            entry.open = entry.limit - int(done[: entry.limit].sum())
            counts = state["epochs"].get(name, {"trained": 0, "dropped": {}})
            entry.trained = counts["trained"] + sum(key[0] == epoch for key in partial)
            entry.dropped = Counter(counts["dropped"])
        # Not retired here: the buffer may reopen partly trained groups first.

    def close_finished(self) -> None:
        """Close epochs that were complete once the buffer has been read."""
        self._retire()


def _ranges(done: np.ndarray, start: int) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], done[start:], [False]]).astype(np.int8)))
    return [[int(a) + start, int(b) + start] for a, b in edges.reshape(-1, 2)]
