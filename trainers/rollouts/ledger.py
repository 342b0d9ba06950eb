"""Which prompt of which epoch is where: every (epoch, row) exactly once, whatever was killed when.

    pending ─▶ in flight ─▶ scored ─▶ queued ─▶ trained
       └───────────┴───────────┴─────────┴────▶ dropped(cause)

Rules:
- `COUNTS` is the one table of what counts towards the epoch;
- a queued group is settled sample by sample: it is *trained* once all its samples are settled and at least one was used by a
  committed optimizer step, *dropped* if none was;
- a group with a trained sample is never generated again: after a resume it is trained, plus what the buffer still holds of it;
- states that do not count are lost with the process: a resumed ledger has them pending.

Prompts are numbered by *position*: row `order(epoch)[position]`, a permutation drawn from (seed, epoch). A stream has its own
order: there the row is the position, and the length of an epoch is known once `ended` says so. Only positions beyond the first
that is not done are remembered one by one, so memory follows what is under way, not what was ever read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np

FORMAT = 2
Key = tuple[int, int]  # (epoch, row)


def key_of(group: str) -> Key:
    """Of a prompt, from the id of its group."""
    epoch, row = group.split(":")
    return int(epoch), int(row)


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
    order: np.ndarray | None  # int64 [prompts], row at each position; None: the row is the position
    position: np.ndarray | None  # int64 [prompts], inverse of order
    limit: int | None  # positions of this epoch that are to be done; None: not known yet
    first: int = 0  # every position below it counts
    cursor: int = 0  # no pending position below it
    counted: int = 0  # positions that count
    states: dict[int, State] = field(default_factory=dict)  # of positions ≥ first that are not pending
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def at(self, position: int) -> State:
        return State.TRAINED if position < self.first else self.states.get(position, State.PENDING)

    def pending(self) -> int | None:
        """The first pending position."""
        self.cursor = max(self.cursor, self.first)
        while self.cursor in self.states:
            self.cursor += 1
        return None if self.limit is not None and self.cursor >= self.limit else self.cursor

    def forget(self) -> None:
        """Let `first` pass over what counts."""
        while COUNTS[self.states.get(self.first, State.PENDING)]:
            del self.states[self.first]
            self.first += 1

    @property
    def complete(self) -> bool:
        return self.limit is not None and self.first >= self.limit

    @property
    def counts(self) -> dict[str, Any]:
        return {"trained": self.trained, "dropped": dict(self.dropped)}


@dataclass(slots=True)
class _Settling:
    left: int
    trained: int = 0
    cause: str = ""


class Ledger:
    """The ledger of one run.

    Args:
        prompts: rows of the dataset; None: a stream.
        seed, shuffle: the order of each epoch; a restored ledger keeps those it was begun with.
        epochs: passes to make (fractions are rounded up to whole prompts; whole for a stream), or None: without end.
    """

    def __init__(self, prompts: int | None, seed: int, shuffle: bool, epochs: float | None) -> None:
        assert prompts is None or prompts > 0, prompts
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.summary: dict[int, dict[str, Any]] = {}  # finished epochs: {"trained": n, "dropped": {cause: n}}
        self._first = 0  # the oldest epoch not done
        self._open: dict[int, _Epoch] = {}
        self._settling: dict[Key, _Settling] = {}
        self._length: int | None = prompts  # of the newest epoch whose length is known

    # Order

    def order(self, epoch: int) -> np.ndarray:
        """Row at each position of an epoch of a finite dataset."""
        assert self.prompts is not None, "a stream has its own order"
        if not self.shuffle:
            return np.arange(self.prompts)
        return np.random.default_rng([self.seed, epoch]).permutation(self.prompts)

    def size(self, epoch: int) -> int | None:
        """Prompts to be done in this epoch; None: the stream has not ended yet."""
        if self.prompts is None:
            if self.epochs is not None and epoch >= self.epochs:
                return 0
            if epoch in self.summary:
                return self.summary[epoch]["trained"] + sum(self.summary[epoch]["dropped"].values())
            return self._open[epoch].limit if epoch in self._open else None
        if self.epochs is None:
            return self.prompts
        # Not ceil alone: 0.1 × 30 is 3.0000000000000004.
        total = math.ceil(round(self.epochs * self.prompts, 6))
        return min(self.prompts, max(0, total - epoch * self.prompts))

    def ended(self, epoch: int, length: int) -> None:
        """The stream of this epoch has `length` rows."""
        self._epoch(epoch).limit = self._length = length
        self._retire()

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._open:
            assert epoch >= self._first, f"epoch {epoch} is done, the oldest open one is {self._first}"
            if self.prompts is None:
                self._open[epoch] = _Epoch(None, None, None)
            else:
                order = self.order(epoch)
                position = np.empty_like(order)
                position[order] = np.arange(self.prompts)
                self._open[epoch] = _Epoch(order, position, self.size(epoch))
        return self._open[epoch]

    # Transitions

    def peek(self) -> Key | None:
        """The next pending prompt, in order. None: there is no more to take, now and for good."""
        epoch = self._first
        while self.size(epoch) != 0:
            entry = self._epoch(epoch)
            position = entry.pending()
            if position is not None:
                return epoch, position if entry.order is None else int(entry.order[position])
            epoch += 1
        return None

    @property
    def exhausted(self) -> bool:
        """No prompt is pending, now and for good. Of a stream that is only known at its end."""
        return self.peek() is None

    def next(self) -> Key | None:
        """Take the next pending prompt; it is in flight from now on."""
        key = self.peek()
        if key is not None:
            self._set(key, State.IN_FLIGHT)
        return key

    @staticmethod
    def _position(entry: _Epoch, row: int) -> int:
        return row if entry.position is None else int(entry.position[row])

    def state(self, key: Key) -> State:
        epoch, row = key
        if epoch < self._first:
            return State.TRAINED  # or dropped: finished epochs keep only counts
        entry = self._epoch(epoch)
        return entry.at(self._position(entry, row))

    def _set(self, key: Key, new: State) -> None:
        entry = self._epoch(key[0])
        position = self._position(entry, key[1])
        assert position >= entry.first, f"prompt {key[0]}:{key[1]} cannot go to {new.name}: it is done"
        old = entry.at(position)
        assert new in _NEXT[old], f"prompt {key[0]}:{key[1]} cannot go from {old.name} to {new.name}"
        entry.states[position] = new
        entry.counted += int(COUNTS[new]) - int(COUNTS[old])
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
        for entry in self._open.values():
            entry.forget()
        while self._first in self._open and self._open[self._first].complete:
            entry = self._open.pop(self._first)
            self.summary[self._first] = entry.counts
            self._first += 1

    # Questions

    @property
    def done(self) -> int:
        """Prompts that count, over all epochs."""
        closed = sum(counts["trained"] + sum(counts["dropped"].values()) for counts in self.summary.values())
        return closed + sum(entry.counted for entry in self._open.values())

    def passes(self, planned: Mapping[Key, int] = MappingProxyType({})) -> float:
        """Passes over the prompts, once the samples `planned` of each group are trained too.

        The first pass over a stream counts once its end was seen.
        """
        whole = Counter(key[0] for key, samples in planned.items() if self._settling[key].left == samples)
        if self.prompts is not None:
            return (self.done + whole.total()) / self.prompts
        if not self._length:
            return float(self._first)
        return self._first + sum(min(1.0, (entry.counted + whole[n]) / self._length) for n, entry in self._open.items())

    def counts(self) -> dict[int, dict[str, Any]]:
        """Of every epoch that began, by number: `{"trained": n, "dropped": {cause: n}}`."""
        return self.summary | {epoch: entry.counts for epoch, entry in sorted(self._open.items())}

    def needed(self) -> dict[int, int]:
        """Per epoch under way, a position below which no row is needed again, not even after a resume."""
        return {epoch: entry.first for epoch, entry in self._open.items()}

    def _done_beyond(self, epoch: int, entry: _Epoch) -> set[int]:
        """Positions ≥ `first` that count, partly trained groups included."""
        partial = {self._position(entry, row) for (of, row), group in self._settling.items() if of == epoch and group.trained}
        return partial | {position for position, state in entry.states.items() if COUNTS[state]}

    # Persistence

    def state_dict(self) -> dict[str, Any]:
        """What counts, as JSON. Positions are in the order of each epoch, ranges half-open."""
        epochs = {str(epoch): counts for epoch, counts in self.counts().items()}
        done, lengths = {}, {}
        next_index = 0
        for epoch, entry in sorted(self._open.items()):
            beyond, frontier = self._done_beyond(epoch, entry), entry.first
            while frontier in beyond:
                frontier += 1
            below = [[0, frontier]] if frontier else []
            if epoch == self._first:
                next_index, below = frontier, []  # the same, said once
            done[str(epoch)] = below + _ranges(sorted(position for position in beyond if position >= frontier))
            if self.prompts is None and entry.limit is not None:
                lengths[str(epoch)] = entry.limit
        drops: Counter[str] = Counter()
        for counts in epochs.values():
            drops.update(counts["dropped"])
        return {
            "format": FORMAT,
            "epoch": self._first,
            "next_index": next_index,
            "done": done,
            "partial": [list(key) for key, group in self._settling.items() if group.trained],
            "epochs": epochs,
            "dropped": dict(drops),
            "prompts": self.prompts,
            "lengths": lengths,  # of a stream's epochs under way that were read to their end
            "length": self._length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore into a fresh ledger. Partly trained groups are trained until `restored` reopens them."""
        assert state["format"] == FORMAT and state["prompts"] == self.prompts, (state["format"], state["prompts"])
        assert not self._open and not self.summary, "a ledger is restored before it is used"
        self.seed, self.shuffle, self._first = state["seed"], state["shuffle"], state["epoch"]
        self._length = state["length"]
        for name, counts in state["epochs"].items():
            if int(name) < self._first:
                self.summary[int(name)] = counts
        for name in sorted({*state["done"], str(self._first)}, key=int):
            epoch = int(name)
            if self.size(epoch) == 0:
                continue
            entry = self._epoch(epoch)
            if name in state["lengths"]:
                entry.limit = state["lengths"][name]
            partial = [self._position(entry, row) for of, row in state["partial"] if of == epoch]
            frontier = state["next_index"] if epoch == self._first else 0
            entry.first = min([frontier, *partial])
            # Trained or dropped makes no difference any more, except to the counts.
            for start, stop in [[entry.first, frontier], *state["done"].get(name, [])]:
                entry.states.update(dict.fromkeys(range(start, stop), State.TRAINED))
            # The passes asked for may have become fewer since.
            limit = 2**63 if entry.limit is None else entry.limit
            entry.counted = min(entry.first, limit) + sum(position < limit for position in entry.states)
            counts = state["epochs"].get(name, {"trained": 0, "dropped": {}})
            entry.trained = counts["trained"] + len(partial)
            entry.dropped = Counter(counts["dropped"])
        # Not retired here: the buffer may reopen partly trained groups first.

    def close_finished(self) -> None:
        """Close epochs that were complete once the buffer has been read."""
        self._retire()


def begun_anew(state: dict[str, Any]) -> dict[str, Any]:
    """The state with every epoch under way not begun: for a stream that cannot say where it was."""
    finished = {name: counts for name, counts in state["epochs"].items() if int(name) < state["epoch"]}
    return state | {"next_index": 0, "done": {}, "partial": [], "lengths": {}, "epochs": finished}


def _ranges(positions: Iterable[int]) -> list[list[int]]:
    """Ascending positions as half-open ranges."""
    ranges: list[list[int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1][1] += 1
        else:
            ranges.append([position, position + 1])
    return ranges
